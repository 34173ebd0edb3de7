"""Small runs on two ranks that are saved in the middle and resumed, from files of this or an earlier release.

`python tests/saved_states.py LABEL` writes tests/data/state-LABEL-NAME.pt for each name in MAKE_ALGORITHM. Every
release adds its own files, and keeps the older files, which later releases load.

All arithmetic after STOP is elementwise, and products that are added are exact, so that a run continues bitwise from a
file on any machine. Only PowerSGD multiplies matrices.
"""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks

FOLDER = Path(__file__).with_name("data")
STOP, END = 4, 9


def _qadam(optimizer: torch.optim.Optimizer) -> tb.Algorithm:
    return tb.QAdamAlgorithm(optimizer, compression="sign1bit", error_feedback=True)


MAKE_ALGORITHM: dict[str, Callable[[torch.optim.Optimizer], tb.Algorithm]] = {
    "bytegrad": lambda optimizer: tb.ByteGradAlgorithm(error_feedback=True),
    "all": lambda optimizer: tb.DecentralizedAlgorithm(),
    "shift_one": lambda optimizer: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low_precision": lambda optimizer: tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": lambda optimizer: tb.DiLoCoAlgorithm(3, outer_lr=0.5, outer_momentum=0.5, delay=2),
    "fragments": lambda optimizer: tb.DiLoCoAlgorithm(4, outer_lr=0.5, outer_momentum=0.5, fragments=2, delay=1),
    "topk": lambda optimizer: tb.TopKAlgorithm(ratio=0.25, momentum=0.5),
    "powersgd": lambda optimizer: tb.PowerSGDAlgorithm(rank=1, start_step=1, min_rate=1),
    "async": lambda optimizer: tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=2),
    "qadam": _qadam,
}


class Scales(nn.Module):
    """Elementwise factors, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 16.0).view(3, 5) / 4)
        self.bias = nn.Parameter(torch.ones(5))
        self.register_buffer("running", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running.mul_(0.5).add_(x[3])
        return torch.cat([self.weight * x[:3], (self.bias * x[3])[None]])


class Trainer:
    """One rank of the run `name`; data differ by rank and step."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.rank = group.rank()
        self.ddp = DistributedDataParallel(Scales(), process_group=group)
        self.optimizer: torch.optim.Optimizer
        if name == "qadam":
            self.optimizer = tb.QAdamOptimizer(self.ddp.parameters(), lr=0.125, warmup_steps=2)
        else:
            # TopK applies its own momentum.
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.25, momentum=0.0 if name == "topk" else 0.5)
        self.algorithm = MAKE_ALGORITHM[name](self.optimizer)

    def step(self, number: int) -> None:
        """Take step `number` of the run."""
        x = ((torch.arange(20) * 7 + 5 * number + 11 * self.rank) % 13 - 6).view(4, 5) / 8
        self.optimizer.zero_grad()
        self.ddp(x).square().sum().backward()
        self.optimizer.step()

    def save(self, attachment: tb.Attachment) -> dict[str, Any]:
        """Return the state that this rank saves."""
        return {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "attachment": attachment.state_dict(),
        }

    def load(self, attachment: tb.Attachment, state: dict[str, Any]) -> None:
        """Continue from the saved state of this rank."""
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        attachment.load_state_dict(state["attachment"])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights."""
        return {name: tensor.clone() for name, tensor in self.ddp.module.state_dict().items()}


def train_and_save(name: str) -> dict[str, Any]:
    """Train, and return by rank the state after STOP steps, and the weights after END steps."""

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        trainer = Trainer(group, name)
        with tb.attach(trainer.ddp, trainer.optimizer, trainer.algorithm) as attachment:
            for number in range(STOP):
                trainer.step(number)
            deadline_s = time.monotonic() + 60
            while name == "async" and not attachment.state_dict()["impl"]["differences"]["weight"].any():
                trainer.step(STOP)  # until a round over differing weights has ended, and its mean waits to be applied
                assert time.monotonic() < deadline_s
            file = io.BytesIO()
            torch.save(trainer.save(attachment), file)
            for number in range(STOP, END):
                trainer.step(number)
            file.seek(0)
            return {**torch.load(file, weights_only=True), "weights_at_end": trainer.weights()}

    return {f"rank{rank}": saved for rank, saved in enumerate(run_ranks(2, body))}


def saved_file(label: str, name: str) -> Path:
    """Return the file of a release's run."""
    return FOLDER / f"state-{label}-{name}.pt"


if __name__ == "__main__":
    (label,) = sys.argv[1:]
    for name in MAKE_ALGORITHM:
        torch.save(train_and_save(name), saved_file(label, name))
