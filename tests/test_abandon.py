"""`Attachment.abandon`, and `attach(init_sync=False)`, with which the survivors train on."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import gloo_group, run_ranks
from torchbagua.algorithms.base import Algorithm

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


def take_steps(module: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        module(x).square().mean().backward()
        optimizer.step()


def fail_in_backward(module: torch.nn.Module) -> None:
    output = module(torch.ones(4, 8))
    output.register_hook(lambda gradient: 1 / 0)
    output.sum().backward()


@pytest.mark.parametrize(
    "algorithm",
    [tb.ByteGradAlgorithm(), tb.DecentralizedAlgorithm(), tb.DiLoCoAlgorithm(2)],
    ids=lambda a: type(a).__name__,
)
def test_survivors_train_on_over_a_new_group(algorithm: Algorithm) -> None:
    """Rank 2 leaves in the middle of a training. Its peers notice at once, and wrap the same module again."""
    store = dist.HashStore()

    def body(group: dist.ProcessGroup) -> list[torch.Tensor] | None:
        rank = group.rank()
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-4)
        attachment = tb.attach(ddp, optimizer, algorithm)
        take_steps(ddp, optimizer, rank, range(3))
        if rank == 2:
            attachment.abandon()
            attachment.abandon()
            with pytest.raises(RuntimeError, match="was abandoned, since a rank failed; wrap its module again"):
                ddp(torch.ones(4, 8))
            return None
        begin_s = time.monotonic()
        with pytest.raises(tb.CommunicationError):
            take_steps(ddp, optimizer, rank, range(3, 9))
        with pytest.raises(ZeroDivisionError):
            fail_in_backward(ddp)
        attachment.abandon()
        assert time.monotonic() - begin_s < 20  # the timeout is 60 s
        take_steps(module, optimizer, rank, range(1))  # the old DDP expects the rest of its last backward
        survivors = gloo_group(dist.PrefixStore("survivors", store), rank, 2)
        for parameter in module.parameters():  # as of one of them
            dist.broadcast(parameter.detach(), group=survivors, group_src=0)
        new = DistributedDataParallel(module, process_group=survivors, init_sync=False)
        holder = [ddp]
        del ddp
        with pytest.raises(RuntimeError, match="is still referenced by an object of the class list; delete the"):
            new(torch.ones(4, 8))
        del holder
        with tb.attach(new, optimizer, algorithm):
            take_steps(new, optimizer, rank, range(2))
        return [parameter.detach().clone() for parameter in module.parameters()]

    first, second, _ = run_ranks(3, body)
    assert first is not None
    assert second is not None
    assert all(map(torch.equal, first, second))


def test_without_init_sync_a_plain_module_keeps_its_weights() -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        module = torch.nn.Linear(2, 1)
        values = []
        for init_sync in (False, True):
            torch.nn.init.constant_(module.weight, group.rank() + 1.0)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            attachment = tb.attach(module, optimizer, tb.LocalSGDAlgorithm(4), process_group=group, init_sync=init_sync)
            values.append(module.weight[0, 0].item())
            attachment.abandon()
            dist.barrier(group)
        return values[0], values[1]

    assert run_ranks(2, body) == [(1.0, 1.0), (2.0, 1.0)]


def test_ranks_compare_init_sync() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="init_sync must be True or False, got 1"):
            tb.attach(module, optimizer, "decentralized", process_group=group, init_sync=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="attach's argument init_sync"):
            tb.attach(module, optimizer, "decentralized", process_group=group, init_sync=group.rank() == 0)

    run_ranks(2, body, timeout=timedelta(seconds=20))
