"""Emulates training on a machine with an accelerator: CPUs wait instead of computing gradients, and only communicate.

Forward and backward are waits of recorded length. Each gradient is ready at its recorded time, without computing or
copying. DDP, its buckets and its hooks are real.
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
    """Sleep until `time.perf_counter()` reaches the deadline; other threads may run."""
    # The deadline is a point in time, so that the errors of many sleeps do not accumulate.
    if (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class IdleModel(nn.Module):
    """A model that waits instead of computing.

    Forward takes as long as in `schedule`. In backward the gradient of each parameter becomes ready at its time. Times
    count from `begin_step`, which replaces `zero_grad`.

    Every step starts with the gradients that the previous step left, in the same memory. With DDP and
    `gradient_as_bucket_view` this memory is DDP's buckets, so the CPU copies no gradients, as on an accelerator.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.schedule = schedule
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(parameter.shape, generator=generator) for parameter in self.model.parameters()]
        # Autograd visits them in reverse order: the parameter that is ready last comes first.
        self._order = sorted(range(len(self.gradients)), key=schedule.ready_s.__getitem__, reverse=True)
        self._begin_s = 0.0

    def begin_step(self) -> None:
        """Start the clock of a step. Gradients stay in their memory, and count as not yet computed."""
        self._begin_s = time.perf_counter()
        for index, parameter in enumerate(self.model.parameters()):
            if parameter.grad is not None:
                self.gradients[index], parameter.grad = parameter.grad, None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        sleep_until(self._begin_s + self.schedule.forward_s)
        output, parameters = torch.zeros(1), list(self.model.parameters())
        for index in self._order:
            output = _Wait.apply(output, parameters[index], partial(self._wait_for_gradient, index))
        return output

    def _wait_for_gradient(self, index: int) -> torch.Tensor:
        sleep_until(self._begin_s + self.schedule.ready_s[index])
        return self.gradients[index].detach()  # it has no other reference, so autograd takes it without a copy


class _Wait(torch.autograd.Function):
    """Passes `output` through, and in backward the gradient of one parameter, once `wait` returns it."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, parameter: torch.Tensor, wait: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        ctx.wait = wait
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.wait(), None


def find_idle_model(module: nn.Module) -> IdleModel | None:
    """Return the idle model in `module`, which may be wrapped in DDP; None if the model computes."""
    return next((part for part in module.modules() if isinstance(part, IdleModel)), None)


class IdleOptimizer(torch.optim.Optimizer):
    """Leaves the weights unchanged: an accelerator updates them in a fraction of a millisecond."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure torch's returns None too
        pass


class IdleQAdamOptimizer(tb.QAdamOptimizer):
    """After its warm-up it counts its steps, and leaves weights and momenta unchanged."""

    def step(self, closure: Any = None) -> Any:
        past = [parameter for parameter in self.parameters if self.is_past_warmup(parameter)]
        for parameter in past:
            self.adopt_momentum(parameter, self.state[parameter]["exp_avg"])
        # Unwrapped: torch already calls the step hooks around this method.
        return None if past else inspect.unwrap(tb.QAdamOptimizer.step)(self, closure)
