"""`Attachment.abandon`, and `attach(init_sync=False)`, with which the survivors train on."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import on_each_rank, run_ranks
from torchbagua.algorithms.base import Algorithm

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


def take_steps(module: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        module(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "algorithm",
    [tb.ByteGradAlgorithm(), tb.DecentralizedAlgorithm(), tb.DiLoCoAlgorithm(2)],
    ids=lambda a: type(a).__name__,
)
def test_peers_of_a_rank_that_abandons_notice_at_once(algorithm: Algorithm) -> None:
    """Rank 2 leaves in the middle of a training."""

    def body(group: dist.ProcessGroup) -> None:
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
            return
        begin_s = time.monotonic()
        with pytest.raises(tb.CommunicationError):
            take_steps(ddp, optimizer, rank, range(3, 9))
        attachment.abandon()
        assert time.monotonic() - begin_s < 20  # the timeout is 60 s

    run_ranks(3, body)


class Holder:
    """Keeps an old DDP, as a user's object may."""

    kept: DistributedDataParallel


@on_each_rank(1)
def test_a_ddp_that_is_still_referenced_when_its_module_is_wrapped_again(group: dist.ProcessGroup) -> None:
    """An error names what refers to it. Without the reference, the module trains on, and no old hook acts."""
    module, holder = copy.deepcopy(MODEL), Holder()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    holder.kept = DistributedDataParallel(module, process_group=group)
    attachment = tb.attach(holder.kept, optimizer, "bytegrad", process_group=group)
    take_steps(holder.kept, optimizer, 0, range(2))
    attachment.abandon()
    ddp = DistributedDataParallel(module, process_group=group, init_sync=False)
    with tb.attach(ddp, optimizer, "bytegrad", process_group=group, init_sync=False):
        with pytest.raises(RuntimeError, match=r"still referenced by .*an object of the class (Holder|dict)"):
            ddp(torch.ones(4, 8))
        del holder.kept
        take_steps(ddp, optimizer, 0, range(2, 4))
    expected = copy.deepcopy(MODEL)
    take_steps(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 0, range(4))
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


@on_each_rank(2)
def test_no_hook_of_an_abandoned_ddp_acts(group: dist.ProcessGroup) -> None:
    """The backward of an earlier forward has this rank's gradients."""
    module, x = copy.deepcopy(MODEL), torch.full((4, 8), 1.0 + group.rank())
    ddp = DistributedDataParallel(module, process_group=group)
    attachment = tb.attach(ddp, torch.optim.SGD(module.parameters(), lr=0.1), "bytegrad", process_group=group)
    loss = ddp(x).square().mean()
    attachment.abandon()
    loss.backward()
    expected = copy.deepcopy(MODEL)
    expected(x).square().mean().backward()
    for parameter, own in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, own.grad)


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
