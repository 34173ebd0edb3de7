"""Torch's optimizers: unwraps wrappers of frameworks, and determines which calls of `step` took effect.

`StepWatch` watches the steps of one optimizer. Three classes listen to it: `StepCount` counts the steps of all
optimizers, which ranks compare in each backward; `StepsTaken` notifies the runner of the steps that were taken, so that
it commits per-parameter state; `StepClock`, in training/steps.py, determines the end of the training step.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua import _concurrency
from torchbagua._torch import has_overflown, has_step_hooks, is_told_to_skip
from torchbagua._warnings import warn_user

# More backward passes without a step than accumulation or skips of a GradScaler explain.
_MANY_BACKWARDS = 200


def unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer that `optimizer` wraps, if the wrapper only forwards calls.

    Such a wrapper, for example accelerate's or Lightning's, shares the state of the wrapped optimizer. A wrapper with
    separate state, for example a Lookahead, does more in a step than the wrapped optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if getattr(optimizer, "state", None) is not inner.state:
            break
        optimizer = inner
    return optimizer


def check_optimizer(where: str, optimizer: object) -> None:
    """Raise TypeError or ValueError, which begins with `where`, unless the steps of `optimizer` can be watched."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        wraps = isinstance(optimizer, torch.Tensor) or bool(_name_wrapped(optimizer))
        got = f"a {type(optimizer).__name__}" if wraps else repr(optimizer)
        raise TypeError(f"{where}: optimizer must be a torch.optim.Optimizer, got {got}{_name_wrapped(optimizer)}")
    if not has_step_hooks(optimizer):
        raise ValueError(
            f"{where}: optimizer must have torch's step hooks, got a {type(optimizer).__name__} without them. Its "
            "__init__ does not call torch.optim.Optimizer.__init__"
            f"{_name_wrapped(optimizer) or '. Pass the optimizer that it wraps instead'}"
        )


def _name_wrapped(wrapper: object) -> str:
    """Return the advice to pass an optimizer that is an attribute of `wrapper`; empty if there is none."""
    attributes: dict[str, object] = getattr(wrapper, "__dict__", {})
    names = [
        name for name, value in attributes.items() if isinstance(value, torch.optim.Optimizer) and has_step_hooks(value)
    ]
    if not names:
        return ""
    inner = f"its attribute {names[0]}, a {type(attributes[names[0]]).__name__}"
    return f". It wraps a torch optimizer: pass {inner}, if a step of the wrapper calls that optimizer's step"


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's state, or that of the optimizer that it wraps, if the wrapper's own is empty."""
    if not optimizer.state:
        for inner in vars(optimizer).values():
            if isinstance(inner, torch.optim.Optimizer):
                return inner.state
    return optimizer.state


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank steps only its share of the parameters, and stores only the state of that share."""
    # Compared by name, since importing torch.distributed.optim emits dozens of torch.jit warnings (torch 2.13).
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of the optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


StepEnd = Callable[[torch.optim.Optimizer, bool], None]


class StepWatch:
    """Notifies its listeners once of every step of an optimizer, when the step ends.

    Listeners are called in the order in which they were added, with the optimizer and whether the step was taken.
    GradScaler calls a fused optimizer even after an overflow. It reports the overflow to the optimizer, which then
    skips the step.

    If `step` calls the `step` of its parent class, torch calls the hooks twice, nested. If `step` raises, torch calls
    only the pre-hook.
    """

    _outermost: FrameType | None = None
    _skips = False
    _reads_overflow = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._listeners: list[StepEnd] = []
        self._at_next_start: list[Callable[[Any, Any], object]] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended. That step may have raised."""
        return self._outermost is not None

    def add(self, listener: StepEnd, *, reads_overflow: bool = True) -> None:
        """Notify `listener` of each step from now on."""
        self._reads_overflow |= reads_overflow
        if not self._hooks:
            self._hooks = [
                self.optimizer.register_step_pre_hook(self._before),
                self.optimizer.register_step_post_hook(self._after),
            ]
        self._listeners.append(listener)

    def remove(self, listener: StepEnd) -> None:
        """Stop notifying `listener`. May be called repeatedly."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def call_at_next_start(self, call: Callable[[Any, Any], object]) -> None:
        """Call `call` once, when the next step begins, with the positional and the keyword arguments of `step`."""
        self._at_next_start.append(call)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_running(self._outermost):
            self._outermost = sys._getframe(1)
            calls, self._at_next_start = self._at_next_start, []
            for call in calls:
                call(args, kwargs)
            # On a GPU this read blocks. Read before the step, to avoid waiting for the kernels of the step too.
            self._skips = self._reads_overflow and is_told_to_skip(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is sys._getframe(1):
            self._outermost = None
            scaler = kwargs.get("grad_scaler")  # an optimizer with the older interface asks it for Inf within `step`
            has_skipped = self._skips or (
                scaler is not None and self._reads_overflow and has_overflown(scaler, optimizer)
            )
            is_taken = not has_skipped
            for listener in tuple(self._listeners):  # a copy, since a listener may end the attachment
                listener(optimizer, is_taken)


def _is_running(call: FrameType | None) -> bool:
    """Return whether the caller runs within the frame `call`."""
    frame = None if call is None else sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


class StepCount:
    """Counts the steps of optimizers, skipped ones too, and those that a loop reports.

    Attributes:
        number: of steps so far.
    """

    number = 0
    _watches: Sequence[StepWatch] = ()

    def listen_to(self, watches: Sequence[StepWatch], owner: object) -> None:
        """Count the steps of these optimizers, until `close`, or until `owner` is garbage-collected."""
        self._watches = watches
        for watch in watches:
            watch.add(self._after_step, reads_overflow=False)
        # Weak, since an optimizer may have a hook that refers to the owner; see `StepsTaken`.
        _concurrency.finalize(owner, _close, weakref.ref(self)).atexit = False

    def close(self) -> None:
        """Stop counting."""
        for watch in self._watches:
            watch.remove(self._after_step)

    def count(self) -> None:
        """Count a step that the loop reports."""
        self.number += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        self.number += 1


class StepListener(Protocol):
    """An object that is notified of the steps that are taken."""

    def commit_step(self, parameters: list[torch.Tensor]) -> None:
        """Commit the state of a step of these parameters, which have a gradient."""
        ...


class StepsTaken:
    """Notifies an object of each step taken, from watched optimizers or, if there are none, from calls of the loop.

    It does not keep the object alive.
    """

    _is_notified_by_loop = False
    _num_backwards = 0  # since the last step

    def __init__(self, listener: StepListener, owner: str) -> None:
        self._listener = weakref.ref(listener)
        self._owner = owner
        self._watches: list[StepWatch] = []
        # Optimizers may outlive a listener that only a DDP hook refers to. The finalizer's arguments live as long as
        # the listener, and the optimizers may have a hook that refers to the listener: hence the weak reference.
        _concurrency.finalize(listener, _close, weakref.ref(self)).atexit = False

    def listen_to(self, watches: Sequence[StepWatch]) -> None:
        """Listen to the steps of these optimizers, until `close`."""
        self._watches += watches
        for watch in watches:
            watch.add(self._after_step)

    def report_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Report a step that the loop took. Raises RuntimeError if optimizers are watched."""
        if self._watches:
            raise RuntimeError(
                f"{self._owner}.step_taken: the runner already watches the steps of {self._names}; do not call it"
            )
        self._is_notified_by_loop = True
        self._commit(parameters)

    def before_backward(self) -> None:
        """Count a synchronized backward. Raises RuntimeError at the second one if nothing reports steps.

        Warns if steps were reported before, or optimizers are watched, and many backward passes had no step.
        """
        if any(watch.is_in_step for watch in self._watches):  # a closure may call backward any number of times
            return
        if self._num_backwards > 0 and not self._watches and not self._is_notified_by_loop:
            raise RuntimeError(
                f"torchbagua: {self._owner} must be notified of the steps that are taken, but the standalone hook does "
                "not see the optimizer. Call runner.step_taken() after each step of the optimizer, or create the "
                "runner with reify(group, optimizer=optimizer)"
            )
        self._num_backwards += 1
        if self._num_backwards == _MANY_BACKWARDS:
            missing = f"step of {self._names}" if self._watches else "call of runner.step_taken()"
            warn_user(
                f"torchbagua: {self._owner} has seen no {missing} in {_MANY_BACKWARDS} synchronized backward passes, "
                "so its state is frozen. Pass the optimizer whose step() changes the weights"
            )

    def close(self) -> None:
        """Stop listening."""
        for watch in self._watches:
            watch.remove(self._after_step)

    @property
    def _names(self) -> str:
        return ", ".join(type(watch.optimizer).__name__ for watch in self._watches)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        if is_taken:
            self._commit(parameters_of(optimizer))

    def _commit(self, parameters: Iterable[torch.Tensor]) -> None:
        self._num_backwards = 0
        if (listener := self._listener()) is not None:
            listener.commit_step([parameter for parameter in parameters if parameter.grad is not None])


def _close(reference: "weakref.ref[StepsTaken] | weakref.ref[StepCount]") -> None:
    if (steps := reference()) is not None:
        steps.close()
