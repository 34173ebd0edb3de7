"""When a training step ends, and what is wrong where none ever does."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torchbagua.torch_private import num_writes, takes_found_inf
from torchbagua.user_warning import warn_user

# So many backward passes in a row may have their gradients cleared before the optimizer steps, while weights change: a
# GradScaler that nobody has handed over skips about a dozen steps when it starts.
_MOST_CLEARED = 45
# After so many the weights are looked at. Fewer are common: a generator's loss gives its critic gradients too.
_SUSPICIOUS = 5
# A critic may step so often for one step of its generator: 100 times in the first iterations of a Wasserstein GAN.
_MOST_STEPS_ALONE = 200


class StepClock:
    """Ends a training step when every optimizer has stepped, or was skipped by a GradScaler, since the last one ended.

    In whatever order, and however often: a critic may step several times for each step of its generator. A step that
    all of them skip is part of the next.

    Args:
        optimizers: whose steps make a training step.
        on_end: called with the optimizer whose step ended it.
        needs_steps: whether nothing is averaged where an optimizer does not step, which is then an error.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        on_end: Callable[[torch.optim.Optimizer], None],
        *,
        needs_steps: bool,
    ) -> None:
        self._on_end = on_end
        self._progress = {id(optimizer): _Progress(optimizer) for optimizer in optimizers}
        self._needs_steps = needs_steps
        self._has_warned = False

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of an optimizer's step that begins; its pre-step hook."""
        progress = self._progress[id(optimizer)]
        # A step that calls its parent class's calls the hooks twice, one call within the other.
        if not _is_running(progress.outermost_step):
            progress.outermost_step = sys._getframe(1)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of an optimizer's step that has ended; its post-step hook."""
        progress = self._progress[id(optimizer)]
        if progress.outermost_step is not sys._getframe(1):
            return
        progress.outermost_step = None
        progress.gradients.forget()
        if progress.skips:  # a fused optimizer, which is told of the overflow and skips by itself
            progress.skips = False
            return
        progress.is_done = True
        progress.num_steps += 1
        self._end_if_done(optimizer)
        if self._needs_steps and progress.num_steps >= _MOST_STEPS_ALONE and not self._has_warned:
            self._has_warned = True
            idle = [type(other.optimizer).__name__ for other in self._progress.values() if not other.is_done]
            warn_user(
                f"torchbagua: {type(optimizer).__name__} has stepped {progress.num_steps} times, and {', '.join(idle)} "
                "not once: nothing is averaged until all optimizers that were attached together have stepped",
            )

    def after_search_for_inf(self, optimizer: torch.optim.Optimizer, *, overflow: bool) -> None:
        """Take note of what a GradScaler has found: it skips the optimizer's next step where there was an overflow."""
        progress = self._progress[id(optimizer)]
        progress.skips = overflow and takes_found_inf(optimizer)
        if overflow:
            progress.gradients.forget()
            progress.is_done = True
            self._end_if_done(optimizer)

    def before_backward(self) -> None:
        """Take note of a backward in training that begins.

        Raises:
            RuntimeError: gradients have been cleared again and again, and no step was taken.
        """
        if not self._counts_gradients:
            return
        for progress in self._progress.values():
            if progress.gradients.were_cleared() >= _MOST_CLEARED:
                raise RuntimeError(
                    f"torchbagua: gradients were cleared {_MOST_CLEARED} times without a step of "
                    f"{type(progress.optimizer).__name__}, which is attached: no weights are averaged. Attach the "
                    "optimizer whose step() changes the weights, as somebody has: not one that another has replaced, "
                    "nor one around which weights are updated by hand"
                )

    def after_backward(self) -> None:
        """Take note of a backward in training that has ended."""
        if self._counts_gradients:
            for progress in self._progress.values():
                progress.gradients.remember()

    @property
    def _counts_gradients(self) -> bool:
        """Whether it matters what becomes of gradients; a closure may clear them often within one step (L-BFGS)."""
        return self._needs_steps and not any(progress.outermost_step for progress in self._progress.values())

    def _end_if_done(self, optimizer: torch.optim.Optimizer) -> None:
        every = list(self._progress.values())
        if not all(progress.is_done for progress in every):
            return
        has_stepped = any(progress.num_steps for progress in every)
        for progress in every:
            progress.is_done, progress.num_steps = False, 0
        if has_stepped:
            self._on_end(optimizer)


class _Progress:
    """What one optimizer has done since the last training step ended.

    Attributes:
        num_steps: its steps.
        is_done: whether it has stepped, or was skipped.
        outermost_step: the call of `step` that it is at, or that has raised.
        skips: whether its next call is one in which it changes nothing.
        gradients: whether they are used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.is_done = False
        self.outermost_step: FrameType | None = None
        self.skips = False
        self.gradients = _UnusedGradients(optimizer)


class _UnusedGradients:
    """Counts backward passes whose gradients were cleared before the optimizer stepped, by one of its parameters.

    Where its values stay as they are, nobody trains: gradients of an attack, or of examples, are cleared too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameter: torch.Tensor | None = None
        self._mark: tuple[int, int] = (0, 0)
        self._num_cleared = 0
        self._values: tuple[torch.Tensor, torch.Tensor] | None = None

    def remember(self) -> None:
        """Note what a backward has left."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        self._parameter = next((parameter for parameter in parameters if parameter.grad is not None), None)
        if self._parameter is not None:
            self._mark = _mark_of(self._parameter.grad)

    def were_cleared(self) -> int:
        """Return how often gradients have been cleared while weights changed, when another backward begins."""
        parameter, self._parameter = self._parameter, None
        if parameter is None or not self._is_cleared(parameter.grad):
            return 0
        self._num_cleared += 1
        if self._num_cleared == _SUSPICIOUS:
            self._values = (parameter, _sum_of(parameter))
        if self._num_cleared < _MOST_CLEARED:
            return 0
        assert self._values is not None
        watched, before = self._values
        has_changed = not torch.equal(_sum_of(watched), before)
        num_cleared = self._num_cleared if has_changed else 0
        self.forget()
        return num_cleared

    def forget(self) -> None:
        """Begin to count again: the optimizer has stepped, or was skipped."""
        self._num_cleared, self._parameter, self._values = 0, None, None

    def _is_cleared(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return True
        # What was clipped, say, has changed too. Seldom asked: a step comes between two backward passes, or nothing.
        return _mark_of(gradient) != self._mark and not gradient.any()


def _is_running(call: FrameType | None) -> bool:
    """Return whether the calling function was called from within `call`."""
    frame = None if call is None else sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def _sum_of(parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    return parameter.detach().sum(dtype=wide)


def _mark_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Return what changes where the gradient is written to, or is another tensor."""
    assert gradient is not None
    return gradient.data_ptr(), num_writes(gradient)
