"""Warnings when an attachment ends: an optimizer took no step, or an exception leaves ranks with different weights."""

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY
from ranks import leave_by_exception, run_ranks
from training import build

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]
UNUSED = "took no step while attached, although weights were trained"
APART = "an exception has ended .*: ranks are left with different weights"


def backward(module: nn.Module) -> None:
    module.zero_grad()
    module(torch.randn(4, 3)).square().sum().backward()


def step_a_new_optimizer(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    new_optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        backward(module)
        new_optimizer.step()


def update_by_hand(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    for _ in range(2):
        backward(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.data -= 0.1 * parameter.grad


def train_as_usual(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    for _ in range(2):
        backward(module)
        attached.step()


def evaluate(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    module.eval()
    backward(module)  # as an adversarial attack does
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0


def only_differentiate(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    for _ in range(3):
        backward(module)


def skip_steps_by_a_scaler(module: nn.Module, attached: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(3):
        module.zero_grad()
        scaler.scale(module(torch.full((4, 3), 1e30)).sum()).backward()
        scaler.step(attached)
        scaler.update()


def messages_of(name: str, loop: Loop) -> list[str]:
    model = build(lambda: nn.Linear(3, 2))

    def body(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, RARELY[name], process_group=tb.BaguaProcessGroup(group)):
            loop(module, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize("loop", [step_a_new_optimizer, update_by_hand])
@pytest.mark.parametrize("name", RARELY)
def test_an_optimizer_that_took_no_step(name: str, loop: Loop) -> None:
    messages = messages_of(name, loop)
    assert len(messages) == 2  # one per rank
    assert all(message.startswith(f"torchbagua: SGD {UNUSED}") for message in messages)


@pytest.mark.parametrize("loop", [train_as_usual, evaluate, only_differentiate, skip_steps_by_a_scaler])
@pytest.mark.parametrize("name", ["decentralized", "async"])
def test_no_warning_if_no_step_was_missed(name: str, loop: Loop) -> None:
    assert not [message for message in messages_of(name, loop) if UNUSED in message]


def test_one_of_two_optimizers_that_took_no_step() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizers = [torch.optim.SGD(module[0].parameters(), lr=0.1), torch.optim.Adam(module[1].parameters())]
        new_optimizer = torch.optim.Adam(module[1].parameters())
        with tb.attach(module, optimizers, "decentralized", process_group=tb.BaguaProcessGroup(group)):
            backward(module)
            optimizers[0].step()
            new_optimizer.step()

    with pytest.warns(RuntimeWarning, match=f"Adam {UNUSED}") as warned:
        run_ranks(1, body)
    assert len(warned) == 1


def weights_after_an_error(
    name: str, go_on: Callable[[nn.Module, torch.optim.Optimizer, dist.ProcessGroup], nn.Module], **options: Any
) -> list[torch.Tensor]:
    """Leave the block by an exception, with different weights on each rank, and call `go_on`."""
    model = build(lambda: nn.Linear(3, 2))

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = copy.deepcopy(model)
        called = DistributedDataParallel(module, process_group=group) if options.get("is_ddp") else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own_group = tb.BaguaProcessGroup(group)
        with suppress(ArithmeticError), tb.attach(called, optimizer, RARELY[name], process_group=own_group):
            optimizer.zero_grad()
            called(torch.full((1, 3), 1.0 + group.rank())).square().sum().backward()
            optimizer.step()
            raise ArithmeticError
        return go_on(called, optimizer, group).weight.detach().clone()

    return run_ranks(2, body)


def leave_as_it_is(called: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> nn.Module:
    return getattr(called, "module", called)


def wrap_again(called: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(leave_as_it_is(called, optimizer, group), process_group=group).module


def attach_again(called: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> nn.Module:
    attachment = tb.attach(called, optimizer, RARELY["decentralized"], process_group=tb.BaguaProcessGroup(group))
    leave_by_exception(attachment)  # without a mean
    return called


@pytest.mark.parametrize("name", RARELY)
@pytest.mark.parametrize("is_ddp", [False, True])
def test_an_exception_leaves_ranks_apart(name: str, is_ddp: bool) -> None:
    with pytest.warns(RuntimeWarning, match=APART) as warned:
        weights = weights_after_an_error(name, leave_as_it_is, is_ddp=is_ddp)
    assert len(warned) == 2  # one per rank
    assert not torch.equal(*weights)


@pytest.mark.parametrize(("is_ddp", "go_on"), [(False, wrap_again), (True, wrap_again), (False, attach_again)])
def test_the_warnings_advice_makes_them_equal(is_ddp: bool, go_on: Any) -> None:
    with pytest.warns(RuntimeWarning, match="wrap the model in DistributedDataParallel again, or attach again to a"):
        assert torch.equal(*weights_after_an_error("decentralized", go_on, is_ddp=is_ddp))


def test_the_exception_is_raised_if_warnings_are_errors(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        weights_after_an_error("decentralized", leave_as_it_is)
    assert capfd.readouterr().err.count("ranks are left with different weights") == 2


@pytest.mark.parametrize(
    ("algorithm", "num_ranks", "num_steps"),
    [
        (tb.ByteGradAlgorithm(), 2, 1),
        (tb.DecentralizedAlgorithm(final_average=False), 2, 1),
        (tb.DecentralizedAlgorithm(), 1, 1),
        (tb.DecentralizedAlgorithm(), 2, 0),  # as if the first forward failed
    ],
    ids=["gradients", "no_final_average", "one_rank", "no_step"],
)
def test_an_exception_without_a_warning(algorithm: tb.Algorithm, num_ranks: int, num_steps: int) -> None:
    model = build(lambda: nn.Linear(3, 2))

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with suppress(ArithmeticError), tb.attach(ddp, optimizer, algorithm):
            for _ in range(num_steps):
                backward(ddp)
                optimizer.step()
            raise ArithmeticError

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(num_ranks, body)
    assert not [warning for warning in caught if "exception" in str(warning.message)]
