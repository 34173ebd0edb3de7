"""A rank that trains a module eagerly, and compiled in several ways; started by torchrun. Prints digests of weights.

Arguments: pairs of a way of `compile_ddp` and a value of `torch._dynamo.config.optimize_ddp`, with a colon between.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

ALGORITHMS = {
    "decentralized": tb.DecentralizedAlgorithm(final_average=False),
    "bytegrad": tb.ByteGradAlgorithm(),
}


class Net(nn.Module):
    """A separate class, since `nn.Sequential.compile` compiles nothing (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(10, 600), nn.BatchNorm1d(600)
        self.second, self.last = nn.Linear(600, 500), nn.Linear(500, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(self.first(x)).tanh()).tanh())


def compile_ddp(ddp: DistributedDataParallel, way: str, backend: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return the function that the loop calls."""
    if way == "inner":
        ddp.module.compile(backend=backend)
    elif way == "ddp.compile":
        ddp.compile(backend=backend)
    elif way == "compile(ddp)":
        return torch.compile(ddp, backend=backend)
    return ddp


def train(name: str, way: str) -> str:
    torch.manual_seed(0)
    torch._dynamo.reset()
    num_graphs = 0
    aot_eager = torch._dynamo.lookup_backend("aot_eager")  # traces backward too, and generates no code

    def backend(*arguments: Any, **options: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(*arguments, **options)

    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1)  # three buckets
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    with tb.attach(ddp, optimizer, ALGORITHMS[name]) as attachment:
        called = compile_ddp(ddp, way, backend)
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.randn(4, 10, generator=data)).square().sum().backward()
            optimizer.step()
        if name == "decentralized":
            assert (attachment.impl.rounds.num_rounds, attachment.impl.rounds.num_backwards) == (4, 3)
        else:
            assert len(list(attachment.runner.gradient_buckets)) > 1
    assert (num_graphs > 0) == (way != "eager"), f"{way}: {num_graphs} graphs"
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in ddp.module.state_dict().values())).hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    for name in ALGORITHMS:
        plain = train(name, "eager")
        for pair in sys.argv[1:]:
            way, mode = pair.split(":")
            with torch._dynamo.config.patch(optimize_ddp={"True": True, "False": False}.get(mode, mode)):
                # A single write, which the other rank's write cannot split.
                print(f"digests {name} {pair} {plain} {train(name, way)}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
