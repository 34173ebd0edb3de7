"""Attachments without a reference in the script: they work while training continues, and are freed after that."""

import copy
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
import torchbagua.compat.bagua
from averaging import RARELY
from ranks import run_ranks
from torchbagua._torch import forget_active_ddp
from training import build

NUM_MODELS = 3
NUM_RANKS = 2


def num_lanes() -> int:
    return sum(thread.name.startswith("torchbagua lane") for thread in threading.enumerate())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle(is_settled: Callable[[], bool]) -> bool:
    """Collect garbage until `is_settled`, for at most 10 s; return whether it is."""
    deadline_s = time.monotonic() + 10
    while not is_settled() and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    return is_settled()


def attach_ddp(module: nn.Module, optimizer: Any, algorithm: Any, group: dist.ProcessGroup) -> nn.Module:
    ddp = DistributedDataParallel(module, process_group=group)
    tb.attach(ddp, optimizer, algorithm)
    return ddp


def attach_module(module: nn.Module, optimizer: Any, algorithm: Any, group: dist.ProcessGroup) -> nn.Module:
    tb.attach(module, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group))
    return module


def attach_driven(module: nn.Module, optimizer: Any, algorithm: Any, group: dist.ProcessGroup) -> nn.Module:
    return module.with_bagua(optimizer, algorithm, group)


def make_optimizer(module: nn.Module, algorithm: Any) -> torch.optim.Optimizer:
    if algorithm == "qadam":
        return tb.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=1)
    return torch.optim.SGD(module.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("attach", "algorithm"),
    [
        (attach_ddp, tb.ByteGradAlgorithm()),
        (attach_ddp, tb.TopKAlgorithm()),
        (attach_ddp, "qadam"),
        (attach_driven, tb.TopKAlgorithm()),
        (attach_ddp, RARELY["diloco"]),
        (attach_ddp, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)),
        (attach_module, tb.AsyncModelAverageAlgorithm(sync_interval_ms=20_000)),
        (attach_module, tb.DecentralizedAlgorithm()),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value).split("(")[0],
)
@pytest.mark.filterwarnings("ignore:torchbagua")
def test_an_unreferenced_attachment_is_freed(attach: Any, algorithm: Any) -> None:
    model = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    barrier = threading.Barrier(NUM_RANKS, timeout=60)
    gc.collect()
    lanes_before = num_lanes()

    def train(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(model)
        optimizer = make_optimizer(module, algorithm)
        called = attach(module, optimizer, algorithm, group)
        gc.collect()
        data = torch.Generator().manual_seed(group.rank())
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.randn(4, 4, generator=data)).square().sum().backward()
            optimizer.step()
        assert num_lanes() > lanes_before  # it works without a reference to the attachment
        barrier.wait()

    def body(group: dist.ProcessGroup) -> int:
        descriptors = []
        for _ in range(NUM_MODELS):
            train(group)
            barrier.wait()
            forget_active_ddp()  # shared by all ranks, which are threads here
            assert settle(lambda: num_lanes() <= lanes_before)
            barrier.wait()
            descriptors.append(num_descriptors())
        return descriptors[-1] - descriptors[0]

    assert min(run_ranks(NUM_RANKS, body)) < 5  # a leaked group would leave five on each rank


@pytest.mark.parametrize("num_steps", [0, 1])
def test_only_a_dropped_attachment_that_has_trained_warns_of_different_weights(num_steps: int) -> None:
    """A program that fails before its first step leaves equal weights."""

    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        attachment = tb.attach(module, optimizer, tb.DiLoCoAlgorithm(9), process_group=tb.BaguaProcessGroup(group))
        for _ in range(num_steps):
            module(torch.rand(2, 4)).sum().backward()
            optimizer.step()
        del attachment  # the module's hooks keep the runner
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    found = [str(warning.message) for warning in caught if "was not detached" in str(warning.message)]
    assert bool(found) == (num_steps > 0)
