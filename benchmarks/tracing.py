"""Times training steps with and without observers, in one run.

    python benchmarks/tracing.py [--ranks 2] [--rounds 40] [--json PATH]

Every rank is a process with one thread. It trains copies of one model with ByteGrad in turns of forty steps: without
observers (twice), with a Summary, and with a Summary, a TensorBoardTrace that writes every ten steps and a
PerfettoTrace. The batch is chosen so that a step takes about 50 ms. A time is the mean of a turn, in which
TensorBoardTrace writes four times. The cost of a trace is the median over the rounds of the difference between its time
and the time without observers. CPU time is that of the whole process, including the threads that write traces; its mean
includes rare work such as the pictures.
"""

import json
import operator
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from environment import make_parser, write_record
from processes import free_port
from table import table
from timing import alternated

STEP_MS = 50.0
# Long enough that a trace's thread, which writes twice a second, writes within the trace's own turn.
STEPS_PER_TURN = 40
STEPS_PER_POINT = 10
WIDTH, NUM_LAYERS, BUCKET_CAP_MB = 512, 24, 8  # 6.3 M parameters


def contestants(folder: Path) -> dict[str, list[tb.observe.Observer]]:
    """Return the observers of each copy of the model."""
    traces = [tb.observe.TensorBoardTrace(folder, STEPS_PER_POINT), tb.observe.PerfettoTrace(folder)]
    return {
        "no observer": [],
        "no observer, again": [],  # its difference to the first is noise
        "Summary": [tb.observe.Summary()],
        "all traces": [tb.observe.Summary(), *traces],
    }


class Trainer:
    """One copy of the model, and its training."""

    def __init__(self, observers: Sequence[tb.observe.Observer]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.attachment = tb.attach(self.ddp, self.optimizer, tb.ByteGradAlgorithm(), observers=observers)

    def train(self, batch: torch.Tensor, num_steps: int = STEPS_PER_TURN) -> tuple[float, float]:
        """Train `num_steps` steps; return the milliseconds and the CPU milliseconds per step."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.ddp(batch).square().mean().backward()
            self.optimizer.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall * 1e3 / num_steps, cpu * 1e3 / num_steps


def run_rank(rank: int, num_ranks: int, num_rounds: int, port: int, folder: str) -> None:
    """Train on one rank, and write rank 0's times to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    trainers = {name: Trainer(observers) for name, observers in contestants(Path(folder) / "trace").items()}
    batch = torch.randn(_batch_size(trainers["no observer"]), WIDTH)
    for trainer in trainers.values():
        trainer.train(batch)
        # A trace then writes its points, every ten steps, in the middle of its turn and not in the next turn.
        trainer.train(batch, STEPS_PER_TURN // 2)
    turns = {name: partial(trainer.train, batch) for name, trainer in trainers.items()}
    times = alternated(turns, num_rounds, warm_ups=0, shows_progress=rank == 0)
    events = trainers["all traces"].attachment.summary()
    for trainer in trainers.values():
        trainer.attachment.detach()
    if rank == 0:
        result = {"batch": len(batch), "times": times, "num_steps": events.figures.num_steps}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _batch_size(trainer: Trainer) -> int:
    """Return the batch size with which a step takes about STEP_MS, the same on all ranks."""
    sizes = (256, 1024)
    for size in sizes:
        trainer.train(torch.randn(size, WIDTH))
    small_ms, large_ms = (trainer.train(torch.randn(size, WIDTH))[0] for size in sizes)
    ms_per_row = max(1e-3, (large_ms - small_ms) / (sizes[1] - sizes[0]))
    wanted = torch.tensor([sizes[0] + (STEP_MS - small_ms) / ms_per_row])
    dist.broadcast(wanted, 0)
    return max(8, int(wanted))


def report(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return the costs of the observers, by name: the figures of the table."""
    walls, cpus = ({name: [turn[kind] for turn in turns] for name, turns in times.items()} for kind in (0, 1))
    base_wall_ms, base_cpu_ms = walls["no observer"], cpus["no observer"]
    rows = {}
    for name, wall_ms in walls.items():
        cpu_ms = cpus[name]
        cost_ms = statistics.median(map(operator.sub, wall_ms, base_wall_ms))
        cpu_cost_ms = statistics.median(map(operator.sub, cpu_ms, base_cpu_ms))
        rows[name] = {
            "ms": statistics.median(wall_ms),
            "cost_ms": cost_ms,
            "cost_percent": 100 * cost_ms / statistics.median(base_wall_ms),
            "cpu_ms": statistics.median(cpu_ms),
            "cpu_cost_percent": 100 * cpu_cost_ms / statistics.median(base_cpu_ms),
            "mean_cpu_cost_percent": 100 * (statistics.fmean(cpu_ms) / statistics.fmean(base_cpu_ms) - 1),
        }
    return rows


def table_of(rows: dict[str, dict[str, float]]) -> str:
    """Return the figures as a Markdown table."""
    head = [
        "observers",
        "ms per step",
        "cost, ms",
        "cost, %",
        "CPU ms per step",
        "CPU cost, %",
        "CPU cost of the mean, %",
    ]
    forms = (".2f", "+.3f", "+.2f", ".2f", "+.2f", "+.2f")
    cells = [
        [name, *(format(figure, form) for figure, form in zip(row.values(), forms, strict=True))]
        for name, row in rows.items()
    ]
    return table(head, cells)


def main() -> None:
    parser = make_parser(__doc__, rounds=40)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = (arguments.ranks, arguments.rounds, free_port(), folder)
        torch.multiprocessing.spawn(run_rank, settings, nprocs=arguments.ranks)
        result = json.loads(Path(folder, "result.json").read_text())
    num_parameters = NUM_LAYERS * (WIDTH + 1) * WIDTH
    print(f"{arguments.ranks} ranks, {num_parameters / 1e6:.1f} M parameters, batch {result['batch']}")
    rows = report(result["times"])
    print(f"\n{table_of(rows)}")
    size = {"ranks": arguments.ranks, "rounds": arguments.rounds, "num_parameters": num_parameters}
    write_record(arguments.json, {**size, "batch": result["batch"], "results": rows})


if __name__ == "__main__":
    main()
