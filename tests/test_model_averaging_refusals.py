"""Refusals of weight algorithms."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Normed, Trainer
from ranks import run_ranks
from training import build


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tb.Decentralized(communication_interval=0), ValueError, "interval must be at least 1, got 0"),
        (lambda: tb.Decentralized(communication_interval=1.5), TypeError, r"interval must be an integer, got 1\.5"),
        (lambda: tb.Decentralized(average_buffers=1), TypeError, "average_buffers must be True or False, got 1"),
        (lambda: tb.Decentralized(True, "ring"), ValueError, r"must be one of \('all', 'shift_one'\), got 'ring'"),
        (lambda: tb.Decentralized(bucket_cap_mb=-1), ValueError, "bucket_cap_mb must be at least 0, got -1"),
        (lambda: tb.LowPrecisionDecentralized(communication_interval=-1), ValueError, "must be at least 1, got -1"),
        (lambda: tb.AsyncModelAverage(sync_interval_ms=-1), ValueError, "interval_ms must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverage(warmup_steps=-1), ValueError, "warmup_steps must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverage("shift_one"), ValueError, "mode must be 'all', got 'shift_one'"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_buffer("table", buffer)
    return module


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (
            lambda rank: with_buffer(torch.zeros(1).to(torch.float8_e5m2)),
            r"buffer table must be float64, .* or complex64, got torch\.float8_e5m2",
        ),
        (
            lambda rank: with_buffer(torch.ones(2, device="meta")),
            "attach: table must have values, got a tensor on the meta device",
        ),
        (
            lambda rank: with_buffer(torch.zeros(5 - 2 * rank)),
            "ranks disagree on the shapes and dtypes of buffers, as a digest",
        ),
        (
            lambda rank: nn.Linear(2, 3) if rank else nn.Linear(3, 2),
            "ranks disagree on the shapes, dtypes and requires_grad of parameters",
        ),
        (
            lambda rank: nn.Sequential(nn.Linear(2, 1), nn.LazyLinear(1)),
            r"attach: 1\.weight has no shape yet; run a forward of the module first",
        ),
    ],
)
def test_modules_that_cannot_be_averaged(make_module: Callable[[int], nn.Module], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = make_module(group.rank())
        optimizer = torch.optim.SGD(p for p in module.parameters() if not nn.parameter.is_lazy(p))
        with pytest.raises(ValueError, match=message):
            tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(2, body)


def test_a_buffer_that_is_not_averaged_may_have_any_dtype() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = with_buffer(torch.zeros(1).to(torch.float8_e5m2))
        optimizer = torch.optim.SGD(module.parameters())
        algorithm = tb.DecentralizedAlgorithm(average_buffers=False)
        tb.attach(module, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group)).detach()

    run_ranks(2, body)


def test_optimizers_of_other_parameters_or_of_other_groups_on_another_rank() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module, own = nn.Linear(2, 1), tb.BaguaProcessGroup(group)
        number = 1 + group.rank()
        apart = [torch.optim.SGD(list(module.parameters())[index::number]) for index in range(number)]
        for optimizers, message in (
            ([torch.optim.SGD(nn.Linear(1, 1).parameters())], "SGD has 2 parameters that are not the module's"),
            (apart, r"the optimizers, .* rank 0 has .*'SGD', \[2\]"),
        ):
            with pytest.raises(ValueError, match=message):
                tb.attach(module, optimizers, "decentralized", process_group=own)

    run_ranks(2, body)


def test_a_compiled_module_instead_of_ddp() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(build(Normed), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with pytest.raises(TypeError, match=r"must be the DistributedDataParallel itself, got OptimizedModule"):
            tb.attach(torch.compile(ddp, backend="eager"), optimizer, "decentralized")

    run_ranks(1, body)


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


def test_async_interval_that_the_timeout_does_not_allow() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with pytest.raises(ValueError, match=r"at most half the timeout of attach or of the group, 60 s, got 31000"):
            tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=31_000))

    run_ranks(1, body)
