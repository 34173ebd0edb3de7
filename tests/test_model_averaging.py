"""Properties of all algorithms that average weights: DDP sends nothing, and all kinds of scripts can use them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import ALGORITHMS, EVERY, RARELY, SYNCHRONOUS, Normed, Trainer, assert_same_weights, train, weights_of
from ranks import init_default_group, run_ranks, without_default_group
from training import build


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in RARELY), ("diloco", {"find_unused_parameters": True})]
)
def test_ddp_sends_nothing(name: str, options: dict[str, Any]) -> None:
    """One rank steps while the other does not: gradients, buffers or flags would block if DDP sent them."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01, **options)
        with tb.attach(trainer.ddp, trainer.optimizer, RARELY[name]):
            trainer.step()
            if group.rank() == 0:
                trainer.step()
            dist.barrier(group=group)
            if group.rank() == 1:
                trainer.step()
        assert trainer.ddp.require_backward_grad_sync
        trainer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_plain_module_is_trained_as_with_ddp(name: str) -> None:
    """Bitwise equal, though every rank starts with different weights, buffers and optimizer state."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        in_ddp = train(group, model, SYNCHRONOUS[name], num_steps=4)
        trainer = Trainer(group, model)
        trainer.ddp = trainer.module
        if group.rank():
            with torch.no_grad():
                for tensor in [*trainer.module.parameters(), *trainer.module.buffers()]:
                    tensor.add_(1)
                for parameter in trainer.optimizer.param_groups[0]["params"]:
                    trainer.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        with tb.attach(trainer.module, trainer.optimizer, SYNCHRONOUS[name], process_group=group):
            for _ in range(4):
                trainer.step()
            trainer.trace.start.append(weights_of(trainer.module))
        trainer.trace.final = weights_of(trainer.module)
        return in_ddp, trainer.trace

    for in_ddp, plain in run_ranks(2, body):
        assert_same_weights([in_ddp.final, plain.final])
        for expected, actual in zip(in_ddp.start, plain.start, strict=True):
            assert_same_weights([expected, actual])


def test_plain_module_without_a_group() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    with (
        without_default_group(),
        pytest.raises(ValueError, match=r"call torch.distributed.init_process_group first, or pass process_group"),
    ):
        tb.attach(module, optimizer, "decentralized")
    init_default_group()
    with tb.attach(module, optimizer, "decentralized"):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(TypeError, match=r"DistributedDataParallel, got Linear: ByteGradAlgorithm averages gradients"):
        tb.attach(module, optimizer, "bytegrad")


@EVERY
def test_switching_within_a_run(name: str) -> None:
    """Gradients, weights, gradients again, then plain DDP: replicas are equal whenever gradients are averaged."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> list[Any]:
        trainer = Trainer(group, model, lr=0.001)
        seen = []
        for algorithm in ("bytegrad", ALGORITHMS[name], "gradient_allreduce", ALGORITHMS[name], None):
            attachment = None if algorithm is None else tb.attach(trainer.ddp, trainer.optimizer, algorithm)
            for _ in range(2):
                trainer.step()
            if attachment is not None:
                attachment.detach()
            state = trainer.optimizer.state_dict()["state"]
            momentum = {str(key): value["momentum_buffer"].clone() for key, value in state.items()}
            # Each rank's BatchNorm sees its own batches; DDP broadcasts rank 0's buffers only in a forward.
            seen.append({key: w for key, w in (weights_of(trainer.module) | momentum).items() if "running" not in key})
        return seen

    for weights in zip(*run_ranks(2, body), strict=True):
        assert_same_weights(weights)


@EVERY
def test_a_buffer_of_minus_infinity_stays(name: str) -> None:
    """An attention mask, for example. A round with it is valid."""

    class Masked(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3,), -torch.inf))

    model = build(Masked)

    def body(group: dist.ProcessGroup) -> None:
        def check_mask(trainer: Trainer, attachment: tb.Attachment) -> None:
            assert bool((trainer.module.mask == -torch.inf).all())
            assert getattr(attachment.impl, "num_dropped", 0) == 0

        train(group, model, ALGORITHMS[name], lr=0.01, num_steps=4, after_step=check_mask)

    run_ranks(2, body)


@pytest.mark.parametrize("skips", [False, True])
def test_accumulated_gradients(skips: bool) -> None:
    """Several backward passes a step, in no_sync or outside: one step, one round. A rank may skip a micro-batch."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()) as attachment:
            for step in range(3):
                trainer.optimizer.zero_grad()
                is_short = skips and (group.rank(), step) == (1, 1)
                with trainer.ddp.no_sync() if not is_short else nullcontext():
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                if not is_short:
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.optimizer.step()
            assert attachment.impl.rounds.step == 3
            assert attachment.impl.rounds.num_backwards == 6 - (skips and group.rank() == 1)
        assert trainer.ddp.require_backward_grad_sync
        return weights_of(trainer.module)

    assert_same_weights(run_ranks(2, body))


def test_detach_makes_moments_equal_and_leaves_learning_rates_alone() -> None:
    """Those of a schedule of numpy numbers differ between ranks; without the last mean, weights differ too."""
    model = build(Normed)

    def body(group: dist.ProcessGroup, algorithm: tb.Algorithm) -> tuple[Any, Any, Any]:
        trainer = Trainer(group, model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: np.float64(0.5) ** step)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm):
            for _ in range(1 + group.rank()):
                trainer.step()
                scheduler.step()
        momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
        return float(trainer.optimizer.param_groups[0]["lr"]), momenta, weights_of(trainer.module)

    for has_mean in (True, False):
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=10_000, final_average=has_mean)
        first, second = run_ranks(2, partial(body, algorithm=algorithm))
        assert (first[0], second[0]) == (0.05, 0.025)
        if has_mean:
            assert all(map(torch.equal, first[1], second[1]))
        assert torch.equal(first[2]["last.weight"], second[2]["last.weight"]) == has_mean


# Refusals.


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
