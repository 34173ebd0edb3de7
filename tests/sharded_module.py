"""A small module sharded with fully_shard, in a process that is the only rank."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchbagua as tb


def sharded(**options: object) -> FSDPModule:
    return fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)  # type: ignore[arg-type]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def assert_trains_as_without(algorithm: str, **options: Any) -> None:
    """Assert that training with `algorithm` and these options of `fsdp.attach` gives bitwise the same weights."""
    torch.manual_seed(0)
    x, weights = torch.randn(8, 4), []
    for attached in (False, True):
        torch.manual_seed(1)
        module = sharded()
        optimizer = optimizer_of(module)
        attachment = tb.fsdp.attach(module, optimizer, algorithm, **options) if attached else None
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        if attachment is not None:
            attachment.detach()
        weights.append([parameter.full_tensor() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))
