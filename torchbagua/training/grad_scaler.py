"""What attach does to a GradScaler, and where it finds one that it was not given."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from torchbagua._torch import FindInf, FoundInf, replace_find_inf, scaled_step_code
from torchbagua.runtime.runner import Runner
from torchbagua.training.step_clock import StepClock

# On a GradScaler that attachments have been given.
_SHARED = "_torchbagua_shared"


def is_stepped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler that is at work has called the step in which this is asked."""
    if getattr(optimizer, "found_inf", None) is not None:  # what it tells a fused optimizer
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
    """Let `runner` decide what `scaler` takes for an overflow of `optimizers`, until what is returned is closed.

    `clock` hears of it.
    """
    # Several attachments may share a scaler, and end in any order.
    shared: _Shared | None = scaler.__dict__.get(_SHARED)
    if shared is None:
        shared = _Shared()
        shared.undo = replace_find_inf(scaler, shared.agreeing)
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


class _Shared:
    """What the attachments that share a GradScaler have put into it.

    Attributes:
        attached: the runner, and the clock, of each optimizer that is attached, by its id.
        undo: gives the scaler back what it was.
    """

    def __init__(self) -> None:
        self.attached: dict[int, tuple[Runner, StepClock]] = {}
        self.undo: Callable[[], None] = lambda: None

    def agreeing(self, find_inf: FindInf) -> FindInf:
        """Return what looks for Inf with `find_inf`, and has the runner of an attached optimizer decide."""

        def find_inf_on_all_ranks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> FoundInf:
            found = find_inf(optimizer, *args, **kwargs)
            if id(optimizer) in self.attached:
                runner, clock = self.attached[id(optimizer)]
                overflow = runner.agree_on_overflow(any(bool(one) for one in found.values()))
                for one in found.values():
                    one.fill_(float(overflow))
                clock.after_search_for_inf(optimizer, overflow=overflow)
            return found

        return find_inf_on_all_ranks
