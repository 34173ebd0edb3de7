"""One rank that trains a module as it is, and then compiled; started by torchrun. Prints two digests of the weights."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb


def train(*, is_compiled: bool) -> str:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    with tb.attach(ddp, optimizer, tb.DecentralizedAlgorithm(final_average=False)) as attachment:
        if is_compiled:
            ddp.compile(backend="eager")
        for _ in range(5):
            optimizer.zero_grad()
            ddp(torch.randn(4, 10, generator=data)).square().sum().backward()
            optimizer.step()
        assert attachment.impl.num_rounds == 6
        assert attachment.impl.num_backwards == 5
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in ddp.module.state_dict().values())).hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    plain, compiled = train(is_compiled=False), train(is_compiled=True)
    print(f"digests {plain} {compiled}\n", end="", flush=True)  # one write, which the other rank's cannot cut in two
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
