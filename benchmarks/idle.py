"""Training as on a machine with an accelerator: processors wait while gradients are computed, and only communicate.

Forward and backward are waits of recorded length. Gradients are there when their times come, and nothing is computed or
copied for it. DDP, its buckets and its hooks are real.
"""

import copy
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import torchbagua as tb
from schedule import Schedule


def sleep_until(deadline_s: float) -> None:
    """Sleep until `time.perf_counter()` says so; other threads may run."""
    # Until a point in time: errors of many sleeps do not sum.
    if (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class IdleModel(nn.Module):
    """A model that waits instead of computing.

    Forward takes as long as in `schedule`. In backward the gradient of each parameter becomes ready at its time. Times
    count from `begin_step`, which takes the place of `zero_grad`.

    Every step has the gradients which the one before has left, in the same memory. Under DDP with
    `gradient_as_bucket_view` that is its buckets: then no processor copies them, as none does on an accelerator.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.schedule = schedule
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(parameter.shape, generator=generator) for parameter in self.model.parameters()]
        # Autograd goes backward through them: the parameter that is ready last comes first.
        self._order = sorted(range(len(self.gradients)), key=schedule.ready_s.__getitem__, reverse=True)
        self._begin_s = 0.0

    def begin_step(self) -> None:
        """Begin the time of a step. Gradients stay where they are, and count as not yet computed."""
        self._begin_s = time.perf_counter()
        for index, parameter in enumerate(self.model.parameters()):
            if parameter.grad is not None:
                self.gradients[index], parameter.grad = parameter.grad, None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        sleep_until(self._begin_s + self.schedule.forward_s)
        output, parameters = torch.zeros(1), list(self.model.parameters())
        for index in self._order:
            output = _Wait.apply(output, parameters[index], partial(self._hand_over, index))
        return output

    def _hand_over(self, index: int) -> torch.Tensor:
        sleep_until(self._begin_s + self.schedule.ready_s[index])
        return self.gradients[index].detach()  # which nobody else refers to: autograd then takes it without a copy


class _Wait(torch.autograd.Function):
    """Hands `output` through, and in backward the gradient of one parameter, once `hand_over` returns it."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, parameter: torch.Tensor, hand_over: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        ctx.hand_over = hand_over
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.hand_over(), None


def find_idle_model(module: nn.Module) -> IdleModel | None:
    """The idle model in `module`, which may be wrapped in DDP; None where the model computes."""
    return next((part for part in module.modules() if isinstance(part, IdleModel)), None)


class IdleOptimizer(torch.optim.Optimizer):
    """Leaves the weights as they are: an accelerator updates them in a fraction of a millisecond."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure torch's returns None too
        pass


class IdleQAdamOptimizer(tb.QAdamOptimizer):
    """Past its warm-up it counts its steps, and leaves weights and momenta as they are."""

    def step(self, closure: Any = None) -> Any:
        past = [parameter for parameter in self.parameters if self.is_past_warmup(parameter)]
        for parameter in past:
            self.adopt_momentum(parameter, self.state[parameter]["exp_avg"])
        # Unwrapped: the hooks of a step are called around this one.
        return None if past else inspect.unwrap(tb.QAdamOptimizer.step)(self, closure)
