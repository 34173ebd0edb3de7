"""Properties of all algorithms that average weights: DDP sends nothing, and all kinds of scripts can use them."""

import copy
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
from training import Branches, Tower, build


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


@pytest.mark.parametrize("name", ["all", "async"])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_graphs_that_need_an_option_of_ddp(name: str, options: dict[str, Any]) -> None:
    model = build(Tower if "static_graph" in options else Branches)

    def body(group: dist.ProcessGroup) -> Any:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            for step in range(4):
                optimizer.zero_grad()
                ddp(torch.randn(4, 10, generator=data), step + group.rank()).square().sum().backward()
                optimizer.step()
        return weights_of(ddp.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    start = dict(model.named_parameters())
    assert not torch.equal(
        weights[0]["layers.0.weight" if "static_graph" in options else "stem.weight"],
        start.get("layers.0.weight", start.get("stem.weight")),
    )


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


def test_without_the_last_mean_every_rank_keeps_its_own_weights() -> None:
    model, algorithm = build(Normed), tb.DecentralizedAlgorithm(final_average=False)
    first, second = run_ranks(2, lambda group: train(group, model, algorithm, num_steps=2).final)
    assert not torch.equal(first["last.weight"], second["last.weight"])


def test_forward_and_backward_inside_the_optimizers_step() -> None:
    """Lightning does this, with a closure: the weights are bitwise equal."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        expected = train(group, model, tb.DecentralizedAlgorithm(), num_steps=4).final
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()):
            for _ in range(4):

                def closure() -> torch.Tensor:
                    trainer.optimizer.zero_grad()
                    loss = trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum()
                    loss.backward()
                    return loss

                trainer.optimizer.step(closure)
        return expected, weights_of(trainer.module)

    for expected, with_closure in run_ranks(2, body):
        assert_same_weights([expected, with_closure])


def test_accumulated_gradients() -> None:
    """Several backward passes a step, inside no_sync (as DDP requires) or outside: one step, one round."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()) as attachment:
            for _ in range(3):
                trainer.optimizer.zero_grad()
                with trainer.ddp.no_sync():
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.optimizer.step()
            assert (attachment.impl.rounds.step, attachment.impl.rounds.num_backwards) == (3, 6)
        assert trainer.ddp.require_backward_grad_sync
        return weights_of(trainer.module)

    assert_same_weights(run_ranks(2, body))


def test_ranks_may_accumulate_different_numbers_of_backward_passes() -> None:
    """A rank that leaves out a bad micro-batch still takes the step, and the round, of the others."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()) as attachment:
            for step in range(4):
                trainer.optimizer.zero_grad()
                for _ in range(1 if (group.rank(), step) == (1, 1) else 3):
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.optimizer.step()
            assert attachment.impl.rounds.num_backwards == 12 - 2 * group.rank()
        return weights_of(trainer.module)

    assert_same_weights(run_ranks(2, body))


def test_several_optimizers_over_one_model() -> None:
    """The first optimizer defines steps; updates of the others between its steps are kept."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        first = torch.optim.SGD(trainer.module.first.parameters(), lr=0.01)
        rest = torch.optim.Adam([*trainer.module.norm.parameters(), *trainer.module.last.parameters()], lr=0.01)
        with tb.attach(trainer.ddp, [first, rest], tb.DecentralizedAlgorithm()) as attachment:
            for _ in range(4):
                first.zero_grad()
                rest.zero_grad()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                first.step()
                rest.step()
            assert attachment.impl.rounds.step == 4
        moments = rest.state_dict()["state"]
        return weights_of(trainer.module) | {str(key): value["exp_avg"] for key, value in moments.items()}

    assert_same_weights(run_ranks(2, body))


def test_a_schedule_of_numpy_numbers_that_differ_between_ranks() -> None:
    """Detach makes the optimizer's moments equal; learning rates stay with the loop, whatever their type."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        trainer = Trainer(group, model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: np.float64(0.5) ** step)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)):
            for _ in range(1 + group.rank()):
                trainer.step()
                scheduler.step()
        momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
        return float(trainer.optimizer.param_groups[0]["lr"]), momenta

    (first_lr, first), (second_lr, second) = run_ranks(2, body)
    assert (first_lr, second_lr) == (0.05, 0.025)
    assert all(map(torch.equal, first, second))


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
