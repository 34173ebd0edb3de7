"""Refusals of weight algorithms."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Normed, Trainer
from ranks import run_ranks
from training import build


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tb.DecentralizedAlgorithm(communication_interval=0),
            "communication_interval must be at least 1, got 0",
        ),
        (
            lambda: tb.LowPrecisionDecentralizedAlgorithm(communication_interval=-1),
            "interval must be at least 1, got -1",
        ),
        (lambda: tb.AsyncModelAverageAlgorithm(sync_interval_ms=-1), "sync_interval_ms must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverageAlgorithm(warmup_steps=-1), "warmup_steps must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverageAlgorithm("shift_one"), "peer_selection_mode must be 'all', got 'shift_one'"),
        (lambda: tb.DecentralizedAlgorithm(True, "ring"), r"must be one of \('all', 'shift_one'\), got 'ring'"),
        (lambda: tb.DecentralizedAlgorithm(bucket_cap_mb=-1), "bucket_cap_mb must be at least 0, got -1"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_types() -> None:
    with pytest.raises(TypeError, match=r"communication_interval must be an integer, got 1\.5"):
        tb.DecentralizedAlgorithm(communication_interval=1.5)
    with pytest.raises(TypeError, match="average_buffers must be True or False, got 1"):
        tb.DecentralizedAlgorithm(average_buffers=1)


@pytest.mark.parametrize(("nodes", "unit"), [(None, "ranks"), ([0, 1, 2, 2, 2], "nodes")])
def test_shift_one_needs_an_even_number(nodes: list[int] | None, unit: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        bagua_group = None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
        with pytest.raises(
            ValueError, match=rf"ShiftOne\(\) \('shift_one'\) pairs {unit} and needs an even number, got 3"
        ):
            tb.attach(
                trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm(True, "shift_one"), process_group=bagua_group
            )
        trainer.step()  # the refused attach left nothing behind

    run_ranks(3 if nodes is None else 5, body)


def test_weights_that_cannot_be_averaged() -> None:
    class Eighths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.register_buffer("total", torch.zeros(1).to(torch.float8_e5m2))

    def body(group: dist.ProcessGroup) -> None:
        module = Eighths()
        optimizer = torch.optim.SGD(module.parameters())
        bagua_group = tb.BaguaProcessGroup(group)
        with pytest.raises(ValueError, match=r"buffer total must be float64, .* or complex64, got torch\.float8_e5m2"):
            tb.attach(module, optimizer, "decentralized", process_group=bagua_group)
        without = tb.DecentralizedAlgorithm(average_buffers=False)
        tb.attach(module, optimizer, without, process_group=bagua_group).detach()
        foreign = torch.optim.SGD(nn.Linear(1, 1).parameters())
        with pytest.raises(ValueError, match="SGD has 2 parameters that are not the module's"):
            tb.attach(module, foreign, "decentralized", process_group=bagua_group)

    run_ranks(2, body)


def test_ranks_with_different_modules_are_refused_at_attach() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(2, 3) if group.rank() else nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters())
        with pytest.raises(ValueError, match="ranks disagree on the shapes, dtypes and requires_grad of parameters"):
            tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(2, body)


def test_async_interval_that_the_timeout_does_not_allow() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with pytest.raises(ValueError, match=r"at most half the timeout of attach or of the group, 60 s, got 31000"):
            tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=31_000))

    run_ranks(1, body)


def uneven_buffer(rank: int) -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_buffer("table", torch.zeros(5 - 2 * rank))
    return module


@pytest.mark.parametrize(
    ("make_module", "num_optimizers", "message"),
    [
        (uneven_buffer, lambda rank: 1, "ranks disagree on the shapes and dtypes of buffers, as a digest"),
        (lambda rank: nn.Linear(2, 1), lambda rank: 1 + rank, r"the optimizers, .* rank 0 has .*'SGD', \[2\]"),
    ],
)  # fmt: skip
def test_ranks_that_attach_different_things(make_module: Any, num_optimizers: Any, message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = make_module(group.rank())
        number = num_optimizers(group.rank())
        optimizers = [torch.optim.SGD(list(module.parameters())[index::number]) for index in range(number)]
        with pytest.raises(ValueError, match=message):
            tb.attach(module, optimizers, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(2, body)


def test_a_lazy_module() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Sequential(nn.Linear(2, 1), nn.LazyLinear(1))
        optimizer = torch.optim.SGD(module[0].parameters())
        with pytest.raises(ValueError, match=r"attach: 1\.weight has no shape yet; run a forward of the module first"):
            tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(1, body)


def test_a_module_with_a_buffer_without_values() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(2, 1)
        module.register_buffer("mask", torch.ones(2, device="meta"))
        optimizer = torch.optim.SGD(module.parameters())
        with pytest.raises(ValueError, match="attach: mask must have values, got a tensor on the meta device"):
            tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(1, body)
