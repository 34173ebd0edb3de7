"""Measures the overhead of the lane over NCCL on one GPU: a GPT of 124 M parameters, bfloat16 autocast, AdamW.

    python benchmarks/nccl_overhead.py [--rounds 15] [--json PATH] [--trace PATH]

The group has one rank, so no bytes cross a network, and ByteGrad returns immediately because it has nothing to average:
its row shows the cost of the hook. The last row runs all local work of a rank, encode, reduce and decode
(whole_mean.py). All contestants take turns in one run; a time is a median over rounds of a few steps each, by the GPU's
clock. `--trace` also writes torch.profiler's trace of a turn of the last row.

`--device cpu --small` tries out the program, over gloo.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from environment import make_parser, write_record
from processes import leave_process_group
from table import table
from timing import alternated, elapsed_ms
from torchbagua.cli.demo.model import GPT
from whole_mean import WholeByteGradAlgorithm


@dataclass(frozen=True)
class Size:
    """The size of a GPT; the default is GPT-2's smallest model."""

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocabulary: int = 50257
    context: int = 1024


SMALL = Size(num_layers=2, width=64, num_heads=2, vocabulary=300, context=32)
BLOCK_STEPS = 4  # steps of a contestant's turn
BASELINE = "plain DDP"
WHOLE = "DDP, ByteGrad but for messages"
ALGORITHMS: dict[str, tb.Algorithm | None] = {
    BASELINE: None,
    "DDP, ByteGrad's hook": tb.ByteGradAlgorithm(),
    WHOLE: WholeByteGradAlgorithm(),
}


class Training:
    """A separate model, and its training steps.

    Args:
        algorithm: the algorithm with which its DDP communicates; None for DDP's own all-reduce.
        is_ddp: False for the module without DDP.
    """

    def __init__(
        self, size: Size, batch: int, device: torch.device, algorithm: tb.Algorithm | None, *, is_ddp: bool = True
    ) -> None:
        torch.manual_seed(0)
        model: nn.Module = GPT(
            width=size.width, num_layers=size.num_layers, num_heads=size.num_heads, vocabulary=size.vocabulary
        ).to(device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._runner: tb.extend.Runner | None = None
        if is_ddp:
            group = dist.group.WORLD
            assert group is not None
            model = DistributedDataParallel(model, process_group=group)
            if algorithm is not None:
                self._runner = algorithm.reify(group)
                model.register_comm_hook(self._runner, tb.comm_hook)
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
        tokens = torch.randint(size.vocabulary, (batch, size.context + 1), device=device)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
        self._device = device

    def steps(self) -> None:
        """Run a turn; this does not wait for the GPU."""
        for _ in range(BLOCK_STEPS):
            self._optimizer.zero_grad()
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                logits = self._model(self._inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), self._targets)
            loss.backward()
            self._optimizer.step()

    def close(self) -> None:
        """End the lane."""
        if self._runner is not None:
            self._runner.close()


def measure(size: Size, batch: int, rounds: int, device: torch.device, trace: Path | None) -> dict[str, Any]:
    """Return the milliseconds per step of every contestant; write a trace to `trace`."""
    trainings = {"no DDP": Training(size, batch, device, None, is_ddp=False)}
    trainings |= {name: Training(size, batch, device, algorithm) for name, algorithm in ALGORITHMS.items()}
    # No head start: a step is long, and the time should show if the host cannot run ahead of the GPU.
    turns = {name: partial(elapsed_ms, device, training.steps) for name, training in trainings.items()}
    blocks_ms = alternated(turns, rounds, warm_ups=2)
    if trace is not None:
        with torch.profiler.profile() as profiler:
            turns[WHOLE]()
        profiler.export_chrome_trace(str(trace))
    for training in trainings.values():
        training.close()
    rounds_ms = {name: [ms / BLOCK_STEPS for ms in values] for name, values in blocks_ms.items()}
    rows = [
        {
            "contestant": name,
            "step_ms": statistics.median(values),
            "over_plain_ms": statistics.median(
                own - plain for own, plain in zip(values, rounds_ms[BASELINE], strict=True)
            ),
            "rounds_ms": values,
        }
        for name, values in rounds_ms.items()
    ]
    return {"num_parameters": trainings[BASELINE].num_parameters, "rows": rows}


def table_of(result: dict[str, Any]) -> str:
    """Return the rows as a Markdown table."""
    rows = [[row["contestant"], f"{row['step_ms']:.2f}", f"{row['over_plain_ms']:+.2f}"] for row in result["rows"]]
    return table(["", "ms/step", "over plain DDP, ms"], rows)


def main() -> None:
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--trace", type=Path, help="file for a trace, .json or .json.gz")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("--device cuda: this torch cannot use a GPU")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1, device_id=device if on_gpu else None
    )

    result = measure(SMALL if arguments.small else Size(), arguments.batch, arguments.rounds, device, arguments.trace)
    leave_process_group()

    print(table_of(result))
    print(f"\nGPT of {result['num_parameters'] / 1e6:.1f} M parameters, one rank, {arguments.rounds} rounds")
    write_record(arguments.json, {"batch": arguments.batch, "block_steps": BLOCK_STEPS, **result})


if __name__ == "__main__":
    main()
