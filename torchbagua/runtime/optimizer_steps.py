"""Torch's optimizers: those that frameworks wrap, and which calls of `step` are steps that were taken.

`StepWatch`: one optimizer's steps. `StepsTaken`: what commits state by parameter. `StepClock`, of
training/step_clock.py: the end of the training step. The last two listen to the same watches.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua._torch import has_overflown, has_step_hooks, is_told_to_skip
from torchbagua._warnings import warn_user

# So many backward passes in a row are no accumulation, nor what a GradScaler skips.
_MANY_BACKWARDS = 200


def unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer that `optimizer` hands its calls on to, where that is all it does.

    Such a wrapper, accelerate's or Lightning's, has the other's state. One with a state of its own, a Lookahead for
    instance, does more in a step than the optimizer in it.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if getattr(optimizer, "state", None) is not inner.state:
            break
        optimizer = inner
    return optimizer


def check_optimizer(where: str, optimizer: object) -> None:
    """Raise TypeError or ValueError, which begins with `where`, unless the steps of `optimizer` can be heard of."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where}: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if not has_step_hooks(optimizer):
        raise ValueError(
            f"{where}: optimizer must have torch's step hooks, got a {type(optimizer).__name__} without: its "
            "__init__ does not call that of torch.optim.Optimizer; hand over the optimizer that it wraps"
        )


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank steps its own share of the parameters, and has the state of that alone."""
    # By name: to import torch.distributed.optim means dozens of warnings of torch.jit (torch 2.13).
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all that it trains, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


StepEnd = Callable[[torch.optim.Optimizer, bool], None]


class StepWatch:
    """Tells its listeners of every step of an optimizer once, when it ends.

    They are called in the order in which they came, with the optimizer, and whether the step was taken: a fused
    optimizer is called after an overflow too, is told of it by GradScaler, and skips by itself.

    A step that calls its parent class's calls torch's hooks twice, one call within the other; a step that raises calls
    the first of them alone.

    Args:
        optimizer: whose hooks are used while there is a listener.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._listeners: list[StepEnd] = []
        self._outermost: FrameType | None = None
        self._skips = False
        self._reads_overflow = False
        self._hooks: list[RemovableHandle] = []

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended; the last one may have raised."""
        return self._outermost is not None

    def add(self, listener: StepEnd, *, reads_overflow: bool = True) -> None:
        """Tell `listener` of each step from now on.

        Args:
            listener: see `StepEnd`.
            reads_overflow: False if `listener` does not need to know whether the step was taken: to read that may mean
                to wait for a GPU. If no other listener needs it, every step counts as taken.
        """
        self._reads_overflow |= reads_overflow
        if not self._hooks:
            self._hooks = [
                self.optimizer.register_step_pre_hook(self._before),
                self.optimizer.register_step_post_hook(self._after),
            ]
        self._listeners.append(listener)

    def remove(self, listener: StepEnd) -> None:
        """Tell `listener` no more; may be called again."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_running(self._outermost):
            self._outermost = sys._getframe(1)
            # On a GPU it waits for what it reads: before the step, whose kernels would be waited for too.
            self._skips = self._reads_overflow and is_told_to_skip(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is sys._getframe(1):
            self._outermost = None
            scaler = kwargs.get("grad_scaler")  # of which a class of an older form finds out within its step
            has_skipped = self._skips or (
                scaler is not None and self._reads_overflow and has_overflown(scaler, optimizer)
            )
            is_taken = not has_skipped
            for listener in tuple(self._listeners):  # one may end the attachment
                listener(optimizer, is_taken)


def _is_running(call: FrameType | None) -> bool:
    """Return whether the calling function was called from within `call`."""
    frame = None if call is None else sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


class StepListener(Protocol):
    """What hears of the steps that are taken."""

    def commit_step(self, parameters: list[torch.Tensor]) -> None:
        """Commit what belongs to a step of these parameters, which have a gradient."""
        ...


class StepsTaken:
    """Tells an object of each step that is taken, by optimizers or, where none is known, by a loop that says so.

    It does not keep the object alive.

    Args:
        listener: the object.
        owner: the name of the algorithm, for errors.
    """

    def __init__(self, listener: StepListener, owner: str) -> None:
        self._listener = weakref.ref(listener)
        self._owner = owner
        self._watches: list[StepWatch] = []
        self._is_told = False
        self._num_backwards = 0  # since the last step
        # Optimizers outlive an object that is forgotten behind a hook of DDP. What is registered here is never let go
        # before the listener, and these optimizers may have a hook that leads to it.
        weakref.finalize(listener, _close, weakref.ref(self)).atexit = False

    def listen_to(self, watches: Sequence[StepWatch]) -> None:
        """Hear of the steps of these optimizers, until `close`."""
        self._watches += watches
        for watch in watches:
            watch.add(self._after_step)

    def tell(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take a loop's word for a step; RuntimeError where its optimizers are watched."""
        if self._watches:
            raise RuntimeError(
                f"{self._owner}.step_taken: the steps of {self._names} are heard of without it; do not call it"
            )
        self._is_told = True
        self._tell(parameters)

    def before_backward(self) -> None:
        """Take note of a synchronised backward; RuntimeError at the second where nobody tells of steps.

        A warning where there were some, or optimizers are known, and steps stay away for long.
        """
        if any(watch.is_in_step for watch in self._watches):  # a closure calls backward as often as it likes
            return
        if self._num_backwards > 0 and not self._watches and not self._is_told:
            raise RuntimeError(
                f"torchbagua: {self._owner} has to know which steps are taken, and behind the standalone hook it hears "
                "of none: call runner.step_taken() after each step of the optimizer, or make the runner by "
                "reify(group, optimizer=optimizer)"
            )
        self._num_backwards += 1
        if self._num_backwards == _MANY_BACKWARDS:
            whom = f"no step of {self._names}" if self._watches else "no runner.step_taken()"
            warn_user(
                f"torchbagua: {self._owner} has heard of {whom} in {_MANY_BACKWARDS} synchronised backward passes: "
                "what it keeps from step to step stands still; hand over the optimizer whose step() changes the weights"
            )

    def close(self) -> None:
        """Hear no more."""
        for watch in self._watches:
            watch.remove(self._after_step)

    @property
    def _names(self) -> str:
        return ", ".join(type(watch.optimizer).__name__ for watch in self._watches)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        if is_taken:
            self._tell(parameters_of(optimizer))

    def _tell(self, parameters: Iterable[torch.Tensor]) -> None:
        self._num_backwards = 0
        if (listener := self._listener()) is not None:
            listener.commit_step([parameter for parameter in parameters if parameter.grad is not None])


def _close(reference: weakref.ref[StepsTaken]) -> None:
    if (steps := reference()) is not None:
        steps.close()
