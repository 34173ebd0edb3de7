"""When a training step ends, and what is wrong where none ever does."""

from collections.abc import Callable, Sequence

import torch

from torchbagua._torch import num_writes
from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import StepWatch, parameters_of
from torchbagua.runtime.shards import local_shard

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
        watches: of the optimizers whose steps make a training step; listened to until `close`.
        on_end: called with the optimizer whose step ended it.
        raises_if_never_stepped: whether nothing is averaged where an optimizer does not step, which is then an error.
        check_gradients: raises if a gradient is sparse. Called after each backward before the first step, and if the
            first gradient of an optimizer is sparse.
    """

    def __init__(
        self,
        watches: Sequence[StepWatch],
        on_end: Callable[[torch.optim.Optimizer], None],
        *,
        raises_if_never_stepped: bool,
        check_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self._check_gradients = check_gradients
        self._has_ended_one = False
        self._progress = {id(watch.optimizer): _OptimizerSteps(watch.optimizer) for watch in watches}
        self._watches = watches
        for watch in watches:
            watch.add(self._after_step)
        self._raises_if_never_stepped = raises_if_never_stepped
        self._has_warned = False

    def close(self) -> None:
        """Hear of no more steps."""
        for watch in self._watches:
            watch.remove(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        progress = self._progress[id(optimizer)]
        progress.gradients.forget()
        progress.was_called = True
        if not is_taken:
            return
        progress.is_done = True
        progress.num_steps += 1
        self._end_if_done(optimizer)
        if self._raises_if_never_stepped and progress.num_steps >= _MOST_STEPS_ALONE and not self._has_warned:
            self._has_warned = True
            idle = [type(other.optimizer).__name__ for other in self._progress.values() if not other.is_done]
            warn_user(
                f"torchbagua: {type(optimizer).__name__} has stepped {progress.num_steps} times, and {', '.join(idle)} "
                "not once: nothing is averaged until all optimizers that were attached together have stepped",
            )

    def after_search_for_inf(self, optimizer: torch.optim.Optimizer, *, overflow: bool) -> None:
        """Take note of what a GradScaler has found: it skips the optimizer's next step where there was an overflow."""
        progress = self._progress[id(optimizer)]
        if overflow:
            progress.gradients.forget()
            progress.is_done = progress.was_called = True
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
        """Take note of a backward in training that has ended.

        Raises:
            ValueError: a gradient is sparse.
        """
        if not (self._has_ended_one and all(progress.gradients.are_dense() for progress in self._progress.values())):
            self._check_gradients()
        if self._counts_gradients:
            for progress in self._progress.values():
                progress.gradients.remember()
                if not progress.was_called:
                    progress.gradients.remember_first()

    @property
    def has_trained(self) -> bool:
        """Whether there was a step, or a backward in training."""
        return any(progress.was_called or progress.gradients.has_first for progress in self._progress.values())

    def unused_optimizers(self) -> list[str]:
        """Return the classes of the optimizers that were never called, although weights of theirs have changed."""
        return [
            type(progress.optimizer).__name__
            for progress in self._progress.values()
            if not progress.was_called and progress.gradients.has_changed_since_first()
        ]

    @property
    def _counts_gradients(self) -> bool:
        """Whether it matters what becomes of gradients; a closure may clear them often within one step (L-BFGS)."""
        return self._raises_if_never_stepped and not any(watch.is_in_step for watch in self._watches)

    def _end_if_done(self, optimizer: torch.optim.Optimizer) -> None:
        every = list(self._progress.values())
        if not all(progress.is_done for progress in every):
            return
        has_stepped = any(progress.num_steps for progress in every)
        for progress in every:
            progress.is_done, progress.num_steps = False, 0
        if has_stepped:
            self._has_ended_one = True
            self._on_end(optimizer)


class _OptimizerSteps:
    """What one optimizer has done since the last training step ended.

    Attributes:
        num_steps: its steps.
        is_done: whether it has stepped, or was skipped.
        was_called: whether it ever was, or a GradScaler has skipped it.
        gradients: whether they are used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.is_done = False
        self.was_called = False
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
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def has_first(self) -> bool:
        """Whether a backward was remembered by `remember_first`."""
        return self._first is not None

    def remember_first(self) -> None:
        """Note the values of the watched parameter after the first backward."""
        if self._first is None and self._parameter is not None:
            self._first = self._parameter, _sum_of(self._parameter)

    def has_changed_since_first(self) -> bool:
        """Return whether these have changed."""
        return self._first is not None and _has_changed(*self._first)

    def are_dense(self) -> bool:
        """Return whether the first gradient is, which is the one that is looked at."""
        first = self._first_with_gradient()
        return first is None or first.grad is None or first.grad.layout is torch.strided

    def _first_with_gradient(self) -> torch.Tensor | None:
        return next((one for one in parameters_of(self._optimizer) if one.grad is not None), None)

    def remember(self) -> None:
        """Note what a backward has left."""
        self._parameter = self._first_with_gradient()
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
        num_cleared = self._num_cleared if _has_changed(*self._values) else 0
        self.forget()
        return num_cleared

    def forget(self) -> None:
        """Begin to count again: the optimizer has stepped, or was skipped."""
        self._num_cleared, self._parameter, self._values = 0, None, None

    def _is_cleared(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return True
        # What was clipped, say, has changed too. Seldom asked: a step comes between two backward passes, or nothing.
        return _mark_of(gradient) != self._mark and not local_shard(gradient).any()


def _sum_of(parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    return local_shard(parameter).detach().sum(dtype=wide)


def _has_changed(parameter: torch.Tensor, sum_before: torch.Tensor) -> bool:
    return not torch.equal(_sum_of(parameter), sum_before)


def _mark_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Return what changes where the gradient is written to, or is another tensor."""
    assert gradient is not None
    gradient = local_shard(gradient)
    return gradient.data_ptr(), num_writes(gradient)
