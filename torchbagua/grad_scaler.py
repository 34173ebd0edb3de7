"""What attach does to a GradScaler, and where it finds one that it was not given."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.step_clock import StepClock

# On a GradScaler that attachments have been given.
_ATTACHED = "_torchbagua_attached"


class _Attached(NamedTuple):
    impl: AlgorithmImpl
    clock: StepClock


def is_stepped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler that is at work has called the step in which this is asked."""
    if getattr(optimizer, "found_inf", None) is not None:  # what it tells a fused optimizer
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler._maybe_opt_step.__code__:
            return True
        frame = frame.f_back
    return False


def agree_on_overflow(
    scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer], impl: AlgorithmImpl, clock: StepClock
) -> ExitStack:
    """Let `impl` decide what `scaler` takes for an overflow of `optimizers`, until what is returned is closed.

    `clock` hears of it.

    Every way on which GradScaler looks for Inf leads through its `_unscale_grads_` (torch 2.11 to 2.13), which has no
    public hook.
    """
    # Several attachments may share a scaler, and end in any order: by the optimizer that is attached.
    attached: dict[int, _Attached] = scaler.__dict__.setdefault(_ATTACHED, {})
    if not attached:
        find_inf = scaler._unscale_grads_

        def find_inf_on_all_ranks(
            optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
        ) -> dict[torch.device, torch.Tensor]:
            found = find_inf(optimizer, *args, **kwargs)
            if id(optimizer) in attached:
                impl, clock = attached[id(optimizer)]
                overflow = impl.agree_on_overflow(any(bool(one) for one in found.values()))
                for one in found.values():
                    one.fill_(float(overflow))
                clock.after_search_for_inf(optimizer, overflow=overflow)
            return found

        scaler._unscale_grads_ = find_inf_on_all_ranks  # type: ignore[method-assign]
    own = {id(optimizer): _Attached(impl, clock) for optimizer in optimizers}
    attached.update(own)

    def remove() -> None:
        for optimizer_id in own:
            del attached[optimizer_id]
        if not attached:
            del scaler._unscale_grads_, scaler.__dict__[_ATTACHED]

    stack = ExitStack()
    stack.callback(remove)
    return stack
