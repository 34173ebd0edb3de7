"""What one rank of the demo does: train the same model with plain DDP and with ByteGrad."""

import json
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import torchbagua as tb
from torchbagua.cli.demo.model import GPT, VOCABULARY
from torchbagua.cli.demo.text import read_standard_library

CONTEXT = 64
SEQUENCES_PER_RANK = 8
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line decides."""

    nproc: int
    steps: int
    seed: int
    traces: str  # the folder that ByteGrad's run is traced to


@dataclass(frozen=True)
class Run:
    """What one rank saw of one training run; one entry a step."""

    losses: list[float]  # nats per byte, of this rank's batch, before the step
    step_ms: list[float]
    sent_bytes: list[int] | None  # by this rank since the start; None where nothing measures it
    num_elements: int  # gradient elements


def train_rank(settings: Settings) -> dict[str, Run]:
    """Trains with plain DDP, then with ByteGrad, from the same weights on the same batches.

    Needs the environment of torchrun. Returns the runs by name, in order.
    """
    torch.set_num_threads(max(1, _count_cores() // settings.nproc))
    text = read_standard_library()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        return {
            "plain DDP": _train("plain DDP", None, text, settings),
            "ByteGrad": _train("ByteGrad", tb.ByteGradAlgorithm(), text, settings, _traces(settings.traces)),
        }
    finally:
        dist.destroy_process_group()


def _traces(folder: str) -> tuple[tb.Observer, ...]:
    return tb.traces.TensorBoardTrace(folder), tb.traces.PerfettoTrace(folder)


def _train(
    name: str,
    algorithm: tb.Algorithm | None,
    text: Tensor,
    settings: Settings,
    traces: tuple[tb.Observer, ...] = (),
) -> Run:
    torch.manual_seed(settings.seed)
    rank = dist.get_rank()
    batches = torch.Generator().manual_seed(settings.seed + rank)
    ddp = DistributedDataParallel(GPT(width=160, num_layers=4, num_heads=5))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
    recorder = tb.traces.Recorder()
    total_sent_bytes = 0
    losses, step_ms, sent_bytes = [], [], []

    with (
        nullcontext() if algorithm is None else tb.attach(ddp, optimizer, algorithm, observers=(recorder, *traces)),
        tqdm(total=settings.steps, desc=f"{name:9}", unit="step", mininterval=0.5, disable=rank != 0) as progress,
    ):
        for _ in range(settings.steps):
            start = time.perf_counter()
            inputs_bt, targets_bt = next_batch(text, batches)
            loss = F.cross_entropy(ddp(inputs_bt).view(-1, VOCABULARY), targets_bt.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step_ms.append((time.perf_counter() - start) * 1e3)
            schedule.step()
            losses.append(loss.item())
            total_sent_bytes += recorder.bytes_sent
            recorder.clear()
            sent_bytes.append(total_sent_bytes)
            progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            progress.update()

    num_elements = sum(parameter.numel() for parameter in ddp.parameters())
    return Run(losses, step_ms, None if algorithm is None else sent_bytes, num_elements)


def next_batch(text: Tensor, batches: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cuts random windows: inputs and targets, each [SEQUENCES_PER_RANK, CONTEXT] int64, targets one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (SEQUENCES_PER_RANK, 1), generator=batches)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    return min((step + 1) / WARMUP_STEPS, 0.51 + 0.49 * math.cos(math.pi * step / steps))


def _count_cores() -> int:
    """The cores this process may use, which a container or taskset can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_runs(folder: Path, rank: int) -> dict[str, Run]:
    """Reads what the process of `rank` wrote into `folder`."""
    document = json.loads(_runs_file(folder, rank).read_text(encoding="utf-8"))
    return {name: Run(**run) for name, run in document.items()}


@record
def _main(settings: str, folder: str) -> None:
    """Trains as the rank that the environment names, and writes the runs into `folder`."""
    runs = train_rank(Settings(**json.loads(settings)))
    document = {name: asdict(run) for name, run in runs.items()}
    _runs_file(Path(folder), int(os.environ["RANK"])).write_text(json.dumps(document), encoding="utf-8")


def _runs_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


if __name__ == "__main__":
    _main(*sys.argv[1:])
