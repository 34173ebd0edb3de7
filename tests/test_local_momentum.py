"""The momentum that replaces the optimizer's in a group of one rank: bitwise equal to torch.optim.SGD's."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from components import GradientComponent, backward, running
from ranks import run_ranks
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.algorithms.gradient.topk import append_local_momentum, check_sgd_without_momentum
from torchbagua.collectives.residuals import Momentum
from torchbagua.runtime.parameter_state import residual_state

MOMENTUM = 0.9
SHAPES = [(5, 7), (11,)]


def append(feedback: ErrorFeedback[Any], bucket: tb.extend.BaguaBucket) -> None:
    feedback.append(bucket, partial(append_local_momentum, feedback.state))


ALGORITHM = GradientComponent(
    make=lambda runner: ErrorFeedback(runner, residual_state("a test", Momentum(MOMENTUM, has_masking=False))),
    append=append,
)


class Descent:
    """Parameters of one rank, and SGD with or without momentum."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=momentum)

    def load_parameters(self, source: "Descent") -> "Descent":
        for own, parameter in zip(self.parameters, source.parameters, strict=True):
            own.data.copy_(parameter.data)
        return self


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected_weights(num_steps: int) -> list[torch.Tensor]:
    plain = Descent(MOMENTUM)
    for step in range(num_steps):
        for parameter, gradient in zip(plain.parameters, gradients(step), strict=True):
            parameter.grad = gradient
        plain.optimizer.step()
    return [parameter.detach() for parameter in plain.parameters]


def equals_sgd(descent: Descent, num_steps: int) -> bool:
    return all(map(torch.equal, descent.parameters, expected_weights(num_steps)))


def test_it_equals_the_momentum_of_sgd() -> None:
    """Halfway, another runner loads the state."""

    def body(group: dist.ProcessGroup) -> None:
        first = Descent()
        with running(group, ALGORITHM, optimizer=first.optimizer) as (runner, _):
            for step in range(4):
                backward(runner, first.parameters, gradients(step))
                first.optimizer.step()
            assert equals_sgd(first, 4)
            state = runner.state_dict()
        assert all(velocity.any() for velocity in state["velocity"].values())
        second = Descent().load_parameters(first)
        with running(group, ALGORITHM, optimizer=second.optimizer) as (runner, _):
            runner.load_state_dict(state)
            for step in range(4, 7):
                backward(runner, second.parameters, gradients(step))
                second.optimizer.step()
        assert equals_sgd(second, 7)

    run_ranks(1, body)


def test_a_step_that_is_not_taken_leaves_no_trace() -> None:
    def body(group: dist.ProcessGroup) -> None:
        descent = Descent()
        with running(group, ALGORITHM, optimizer=descent.optimizer) as (runner, _):
            for step in range(3):
                backward(runner, descent.parameters, [torch.full(shape, torch.inf) for shape in SHAPES])
                backward(runner, descent.parameters, gradients(step))
                descent.optimizer.step()
        assert equals_sgd(descent, 3)

    run_ranks(1, body)


def test_it_sends_nothing() -> None:
    def body(group: dist.ProcessGroup) -> int:
        recorder, descent = tb.observe.Recorder(), Descent()
        with running(group, ALGORITHM, optimizer=descent.optimizer, observers=[recorder]) as (runner, _):
            backward(runner, descent.parameters, gradients(0))
        return recorder.bytes_sent

    assert run_ranks(1, body) == [0]


def test_the_optimizer_must_leave_the_momentum_to_the_algorithm() -> None:
    plain, parameters = Descent().optimizer, [torch.nn.Parameter(torch.zeros(2))]
    check_sgd_without_momentum("Owner", MOMENTUM, [plain, plain])
    groups = [{"params": parameters}, {"params": [torch.nn.Parameter(torch.zeros(2))], "momentum": 0.5}]
    for optimizer, message in (
        (torch.optim.Adam(parameters), r"^Owner: with momentum=0\.9 the optimizer must be .*SGD, got Adam$"),
        (torch.optim.SGD(groups), r"^Owner: with momentum=0\.9 SGD's momentum must be 0, .*, got 0\.5$"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sgd_without_momentum("Owner", MOMENTUM, [plain, optimizer])
