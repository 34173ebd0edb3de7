"""GradScaler: makes it agree on overflows over all ranks, and notices one that `attach` was not given."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua._torch import (
    FindInf,
    FoundInf,
    call_before_scaled_step,
    is_scaled_in_step,
    loss_scale_of,
    num_writes,
    replace_find_inf,
)
from torchbagua._warnings import warn_user
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.runner import Runner
from torchbagua.training.checks import TrainingSetup
from torchbagua.training.ddp import call_before_forward


class LossScale:
    """Copies the loss scale to the host early, so that a read of it hardly blocks.

    In a backward, `GradScaler.get_scale` waits for all work that was queued on the GPU before it. The copy is queued
    before the forward, right after the last step. In that step `GradScaler.step` already made the host wait for the
    gradients, so little work is left ahead of the copy.
    """

    def __init__(self, scaler: torch.amp.GradScaler, wait: Callable[[torch.cuda.Event], object]) -> None:
        self._scaler = scaler
        self._wait = wait
        self._copied: tuple[torch.Tensor, int, HostCopy] | None = None

    def before_forward(self, inputs: Any) -> None:
        """Start copying the scale if it has changed since the last copy."""
        if torch.compiler.is_compiling():  # the compiler would trace stream calls
            return
        scale = loss_scale_of(self._scaler)
        if scale is not None and is_on_gpu(scale) and not self._is_copied(scale):
            self._copied = scale, num_writes(scale), HostCopy(scale)

    def read(self) -> float:
        """Return the scale from the copy or, if the scale has changed since, from the scaler."""
        scale = loss_scale_of(self._scaler)
        if self._copied is not None and scale is not None and self._is_copied(scale):
            return self._copied[2].value(self._wait)
        return self._scaler.get_scale()

    def _is_copied(self, scale: torch.Tensor) -> bool:
        return self._copied is not None and self._copied[0] is scale and self._copied[1] == num_writes(scale)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether `HostCopy` can copy this tensor."""
    return tensor.is_cuda


class HostCopy:
    """A host copy of a number, which the GPU writes in the order of the current stream."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
        self._number.copy_(number, non_blocking=True)
        self._done = torch.cuda.current_stream(number.device).record_event()

    def value(self, wait: Callable[[torch.cuda.Event], object]) -> float:
        """Return the number, once the GPU has copied it."""
        wait(self._done)
        return float(self._number.item())


def watch_loss_scale(setup: TrainingSetup, runner: GradientRunner, undo: ExitStack) -> None:
    """Have `runner` read the GradScaler's scale, or warn of one that `attach` was not given, until `undo` is closed."""
    if setup.grad_scaler is None:
        undo.callback(UnknownScaler(runner, "residuals would be stored with a wrong scale").close)
        return
    loss_scale = LossScale(setup.grad_scaler, runner.process_group.private.wait_for_mark)
    runner.use_grad_scaler(setup.grad_scaler, loss_scale.read)
    call_before_forward(setup.called, loss_scale.before_forward, undo)


# Attribute of a GradScaler that was passed to `attach`.
_SHARED = "_torchbagua_shared"


def install_overflow_agreement(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    decide: Callable[[bool], bool],
    on_decision: Callable[[torch.optim.Optimizer, bool], None],
) -> ExitStack:
    """Have `decide` decide whether `scaler` sees an overflow of `optimizers`, until the returned stack is closed."""
    # Several attachments may share a scaler, and be detached in any order.
    shared: _SharedScaler | None = scaler.__dict__.get(_SHARED)
    if shared is None:
        shared = _SharedScaler()
        shared.undo = replace_find_inf(scaler, shared.wrap_find_inf)
        scaler.__dict__[_SHARED] = shared
    own = {id(optimizer): (decide, on_decision) for optimizer in optimizers}
    shared.attached.update(own)

    def remove() -> None:
        for optimizer_id in own:
            del shared.attached[optimizer_id]
        if not shared.attached:
            shared.undo()
            del scaler.__dict__[_SHARED]

    stack = ExitStack()
    stack.callback(remove)
    return stack


class _SharedScaler:
    """The state that attachments with a common GradScaler share.

    Attributes:
        attached: who decides on an overflow of each attached optimizer, and who is notified, by the optimizer's id.
        undo: restores the scaler.
    """

    def __init__(self) -> None:
        self.attached: dict[int, tuple[Callable[[bool], bool], Callable[[torch.optim.Optimizer, bool], None]]] = {}
        self.undo: Callable[[], None] = lambda: None

    def wrap_find_inf(self, find_inf: FindInf) -> FindInf:
        """Return a function that searches for Inf with `find_inf` and lets the optimizer's runner decide."""

        def find_inf_on_all_ranks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> FoundInf:
            found = find_inf(optimizer, *args, **kwargs)
            if id(optimizer) in self.attached:
                decide, on_decision = self.attached[id(optimizer)]
                overflow = decide(any(bool(found_inf) for found_inf in found.values()))
                for found_inf in found.values():
                    found_inf.fill_(float(overflow))
                on_decision(optimizer, overflow)
            return found

        return find_inf_on_all_ranks


class UnknownScaler:
    """Warns, and calls `on_found`, if a GradScaler that `attach` was not given calls an optimizer's first step."""

    def __init__(self, runner: Runner, consequence: str, on_found: Callable[[], None] = lambda: None) -> None:
        self._name = runner.name
        self._consequence = consequence
        self._on_found = on_found
        self._has_found = False
        self._asked: set[torch.optim.Optimizer] = set()
        self._installed = {watch.optimizer: ExitStack() for watch in runner.step_watches}
        for watch in runner.step_watches:
            self._installed[watch.optimizer].callback(
                call_before_scaled_step(watch.optimizer, partial(self._asked.add, watch.optimizer))
            )
            watch.call_at_next_start(partial(self._before_step, watch.optimizer))

    def close(self) -> None:
        """Stop watching."""
        for stack in self._installed.values():
            stack.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._installed[optimizer].close()
        if self._has_found or not (optimizer in self._asked or is_scaled_in_step(optimizer)):
            return
        self._has_found = True
        self._on_found()
        warn_user(
            f"torchbagua: {type(optimizer).__name__} is stepped by a GradScaler that {self._name} was not given: "
            f"{self._consequence}; pass the GradScaler: attach(..., grad_scaler=scaler)"
        )
