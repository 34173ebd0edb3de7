"""Makes a GradScaler agree on overflows over all ranks, and detects a GradScaler that `attach` was not given."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from torchbagua._torch import FindInf, FoundInf, replace_find_inf, scaled_step_code
from torchbagua.runtime.runner import Runner
from torchbagua.training.step_clock import StepClock

# Attribute of a GradScaler that was passed to `attach`.
_SHARED = "_torchbagua_shared"


def is_stepped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an enabled GradScaler called the optimizer step that is now running."""
    if getattr(optimizer, "found_inf", None) is not None:  # GradScaler sets it on a fused optimizer
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is scaled_step_code():
            return True
        frame = frame.f_back
    return False


def install_overflow_agreement(
    scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer], runner: Runner, clock: StepClock
) -> ExitStack:
    """Have `runner` decide whether `scaler` sees an overflow of `optimizers`, until the returned stack is closed.

    `clock` is notified of each decision.
    """
    # Several attachments may share a scaler, and be detached in any order.
    shared: _SharedScaler | None = scaler.__dict__.get(_SHARED)
    if shared is None:
        shared = _SharedScaler()
        shared.undo = replace_find_inf(scaler, shared.wrap_find_inf)
        scaler.__dict__[_SHARED] = shared
    own = {id(optimizer): (runner, clock) for optimizer in optimizers}
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
        attached: the runner and the clock of each attached optimizer, by the optimizer's id.
        undo: restores the scaler.
    """

    def __init__(self) -> None:
        self.attached: dict[int, tuple[Runner, StepClock]] = {}
        self.undo: Callable[[], None] = lambda: None

    def wrap_find_inf(self, find_inf: FindInf) -> FindInf:
        """Return a function that searches for Inf with `find_inf` and lets the optimizer's runner decide."""

        def find_inf_on_all_ranks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> FoundInf:
            found = find_inf(optimizer, *args, **kwargs)
            if id(optimizer) in self.attached:
                runner, clock = self.attached[id(optimizer)]
                overflow = runner.agree_on_overflow(any(bool(found_inf) for found_inf in found.values()))
                for found_inf in found.values():
                    found_inf.fill_(float(overflow))
                clock.after_search_for_inf(optimizer, overflow=overflow)
            return found

        return find_inf_on_all_ranks
