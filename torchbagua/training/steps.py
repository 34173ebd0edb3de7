"""The training step: hooks on the module, gradients, the end of backward and optimizers, and the clock of its end."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua._torch import is_in_backward, leaves, num_writes, queue_callback
from torchbagua._warnings import warn_user
from torchbagua.observe.events import Timestamp
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.optimizer_steps import StepWatch, parameters_of
from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.runner import Runner
from torchbagua.training.checks import TrainingSetup
from torchbagua.training.ddp import ModuleHook, call_before_forward

# The number of consecutive backward passes, with changing weights, after which gradients cleared without an optimizer
# step are an error. It exceeds a dozen, since a GradScaler that `attach` was not given skips that many steps at first.
_MOST_CLEARED = 45

# The number of such passes after which the weights are compared. Fewer are common: a generator's loss also computes
# gradients for its critic.
_SUSPICIOUS = 5

# How often one optimizer may step while another does not: a critic steps 100 times for one step of its generator in the
# first iterations of a Wasserstein GAN.
_MOST_STEPS_ALONE = 200


class StepClock:
    """Ends a training step once every optimizer has stepped, or was skipped by a GradScaler, since the last end.

    The optimizers may step in any order and any number of times: a critic may step several times for each step of its
    generator. A step that all optimizers skip is part of the next training step. If the last training step ended before
    an optimizer's step after the same backward, because another optimizer had left out a step, then the late step does
    not begin the next training step: otherwise all later training steps would end too early.
    """

    _has_ended_one = False
    _ended_by: torch.optim.Optimizer | None = None  # since the last backward
    _has_warned = False
    _has_warned_of_late = False

    def __init__(
        self,
        watches: Sequence[StepWatch],
        on_end: Callable[[torch.optim.Optimizer], None],
        *,
        raises_if_never_stepped: bool,
        check_gradients: Callable[[], None],
    ) -> None:
        self._on_end = on_end
        self._check_gradients = check_gradients
        self._progress = {id(watch.optimizer): _OptimizerProgress(watch.optimizer) for watch in watches}
        self._watches = watches
        for watch in watches:
            watch.add(self._after_step)
        self._raises_if_never_stepped = raises_if_never_stepped

    def close(self) -> None:
        """Stop listening to steps."""
        for watch in self._watches:
            watch.remove(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        progress = self._progress[id(optimizer)]
        progress.note_call()
        if not is_taken:
            return
        is_late, progress.follows_backward = self._is_late(progress), True
        if is_late:
            self._warn_of_late(optimizer)
            return
        progress.is_done = True
        progress.num_steps += 1
        self._end_if_done(optimizer)
        if self._raises_if_never_stepped and progress.num_steps >= _MOST_STEPS_ALONE and not self._has_warned:
            self._has_warned = True
            idle = [type(other.optimizer).__name__ for other in self._progress.values() if not other.is_done]
            warn_user(
                f"torchbagua: {type(optimizer).__name__} has stepped {progress.num_steps} times, but {', '.join(idle)} "
                "never: nothing is averaged until all optimizers that were attached together have stepped",
            )

    def after_search_for_inf(self, optimizer: torch.optim.Optimizer, overflow: bool) -> None:
        """Record the result of a GradScaler's search: after an overflow it skips the optimizer's next step."""
        progress = self._progress[id(optimizer)]
        if overflow:
            progress.note_call()
            is_late, progress.follows_backward = self._is_late(progress), True
            if not is_late:
                progress.is_done = True
                self._end_if_done(optimizer)

    def before_backward(self) -> None:
        """Record the start of a backward in training."""
        self._ended_by = None
        for progress in self._progress.values():
            progress.follows_backward = False
        if not self._counts_gradients:
            return
        for progress in self._progress.values():
            if progress.gradients.are_never_used():
                raise RuntimeError(
                    f"torchbagua: gradients were cleared {_MOST_CLEARED} times without a step of "
                    f"{type(progress.optimizer).__name__}, which is attached: no weights are averaged. Attach the "
                    "optimizer whose step() updates these weights, not an optimizer that was replaced or that manual "
                    "updates bypass"
                )

    def after_backward(self) -> None:
        """Record the end of a backward in training."""
        if not (self._has_ended_one and all(progress.gradients.are_dense() for progress in self._progress.values())):
            self._check_gradients()
        if self._counts_gradients:
            for progress in self._progress.values():
                progress.gradients.remember(is_unused=not progress.was_called)

    def state(self) -> list[int | None]:
        """Return each optimizer's number of steps in the unfinished training step, or None if it has yet to step."""
        return [progress.num_steps if progress.is_done else None for progress in self._progress.values()]

    def load_state(self, state: Sequence[int | None]) -> None:
        """Load the return value of `state`. Begin a new training step if it is of another number of optimizers."""
        counts = state if len(state) == len(self._progress) else [None] * len(self._progress)
        self._ended_by = None
        for progress, count in zip(self._progress.values(), counts, strict=True):
            progress.is_done, progress.num_steps = count is not None, count or 0
            progress.follows_backward = False

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer step or a backward in training has happened."""
        return any(progress.was_called or progress.gradients.first for progress in self._progress.values())

    def unused_optimizers(self) -> list[str]:
        """Return the class names of optimizers that were never called although their weights have changed."""
        return [
            type(progress.optimizer).__name__
            for progress in self._progress.values()
            if not progress.was_called and progress.gradients.has_changed_since_first()
        ]

    @property
    def _counts_gradients(self) -> bool:
        """Whether to count cleared gradients. Not within a step: its closure may clear them often (L-BFGS)."""
        return self._raises_if_never_stepped and not any(watch.is_in_step for watch in self._watches)

    def _is_late(self, progress: "_OptimizerProgress") -> bool:
        """Return whether a step or a skip now belongs to the training step that ended last."""
        return not progress.follows_backward and self._ended_by is not None

    def _warn_of_late(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_warned_of_late:
            self._has_warned_of_late = True
            late, ender = type(optimizer).__name__, type(self._ended_by).__name__
            warn_user(
                f"torchbagua: {late} stepped after the training step had ended, because {ender}, which ended it, took "
                "no step after an earlier backward. A round at such an end leaves different weights on each rank. Step "
                f"all optimizers in every step of the loop, or step {ender} last"
            )

    def _end_if_done(self, optimizer: torch.optim.Optimizer) -> None:
        every = list(self._progress.values())
        if not all(progress.is_done for progress in every):
            return
        has_stepped = any(progress.num_steps for progress in every)
        for progress in every:
            progress.is_done, progress.num_steps = False, 0
        if has_stepped:
            self._has_ended_one = True
            self._ended_by = optimizer
            self._on_end(optimizer)


class _OptimizerProgress:
    """The progress of one optimizer since the last training step ended."""

    num_steps = 0
    is_done = False  # whether it has stepped or was skipped by a GradScaler
    was_called = False  # whether it has ever stepped or been skipped
    follows_backward = False  # whether it has stepped or was skipped since the last backward

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.gradients = _UnusedGradients(optimizer)

    def note_call(self) -> None:
        """Record a step or a skip."""
        self.gradients.forget()
        self.was_called = True


class _UnusedGradients:
    """Counts backward passes whose gradients were cleared before the optimizer stepped.

    It watches one parameter of the optimizer. If the parameter's values do not change, the loop does not train: it may
    compute gradients of an attack, or of examples, and clear them too.
    """

    first: tuple[torch.Tensor, torch.Tensor] | None = None  # as of the first backward
    _parameter: torch.Tensor | None = None
    _mark: tuple[int, int] = (0, 0)
    _num_cleared = 0
    _values: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def has_changed_since_first(self) -> bool:
        """Return whether the values have changed since the first backward."""
        return self.first is not None and _has_changed(*self.first)

    def are_dense(self) -> bool:
        """Return whether the first gradient, the only one that is checked, is dense."""
        first = self._first_with_gradient()
        return first is None or first.grad is None or first.grad.layout is torch.strided

    def _first_with_gradient(self) -> torch.Tensor | None:
        return next((parameter for parameter in parameters_of(self._optimizer) if parameter.grad is not None), None)

    def remember(self, *, is_unused: bool) -> None:
        """Record the gradient that a backward has left; `is_unused` if the optimizer was never called."""
        self._parameter = self._first_with_gradient()
        if self._parameter is not None:
            self._mark = _mark_of(self._parameter.grad)
            if is_unused and self.first is None:
                self.first = self._parameter, _sum_of(self._parameter)

    def are_never_used(self) -> bool:
        """Return whether too many were cleared while weights changed. Call it when the next backward begins."""
        parameter, self._parameter = self._parameter, None
        if parameter is None or not self._is_cleared(parameter.grad):
            return False
        self._num_cleared += 1
        if self._num_cleared == _SUSPICIOUS:
            self._values = (parameter, _sum_of(parameter))
        if self._num_cleared < _MOST_CLEARED:
            return False
        assert self._values is not None
        has_changed = _has_changed(*self._values)
        self.forget()
        return has_changed

    def forget(self) -> None:
        """Start counting again."""
        self._num_cleared, self._parameter, self._values = 0, None, None

    def _is_cleared(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return True
        # Gradients that were only clipped, for instance, have changed too. The values are rarely checked:
        # usually an optimizer steps between two backward passes, or gradients accumulate unchanged.
        return _mark_of(gradient) != self._mark and not local_shard(gradient).any()


def _sum_of(parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    return local_shard(parameter).detach().sum(dtype=wide)


def _has_changed(parameter: torch.Tensor, sum_before: torch.Tensor) -> bool:
    return not torch.equal(_sum_of(parameter), sum_before)


def _mark_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Return a value that changes when the gradient is written to or replaced by another tensor."""
    assert gradient is not None
    gradient = local_shard(gradient)
    return gradient.data_ptr(), num_writes(gradient)


def install_step_hooks(
    setup: TrainingSetup,
    runner: Runner,
    undo: ExitStack,
    *,
    before_end: Callable[[], None] = lambda: None,
    is_weight_algorithm: bool = False,
) -> StepClock:
    """Install the hooks that the impl asks for until `undo` is closed. `before_end` is called when a step ends."""
    wrappers, module, impl, tracer = setup.called, setup.inner, runner.impl, runner.tracer
    on_forward = impl.init_forward_pre_hook(module)
    on_gradient = impl.init_backward_hook(module)
    on_backward_end = impl.init_post_backward_hook(module)
    on_step = impl.init_post_optimizer_step_hook(module)

    def end_step(optimizer: torch.optim.Optimizer) -> None:
        try:
            before_end()
            if on_step is not None:
                on_step(optimizer)
        finally:
            # Only after on_step, in which the algorithm may wait for communication of this step.
            tracer.end_step()

    must_step = is_weight_algorithm and on_step is not None  # it averages only when a step ends
    needs_steps = is_weight_algorithm or on_step is not None or tracer.is_on
    clock = StepClock(
        runner.step_watches if needs_steps else [],
        end_step,
        raises_if_never_stepped=must_step,
        check_gradients=setup.check_gradients,
    )
    undo.callback(clock.close)
    if on_forward is not None:
        call_before_forward(wrappers, on_forward, undo)
    if on_backward_end is not None or must_step or tracer.is_on:
        backward = _Backward(tracer, on_backward_end, clock if must_step else None)
        undo.callback(backward.close)

        def after_forward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            if module in wrappers:
                backward.watch(outputs, is_training=any(wrapper.training for wrapper in wrappers))

        for wrapper in wrappers:
            undo.callback(wrapper.register_forward_hook(ModuleHook(after_forward)).remove)
    if on_gradient is not None:
        for name, parameter in setup.trained().items():
            undo.callback(parameter.register_post_accumulate_grad_hook(partial(on_gradient, name)).remove)
    return clock


def _leaves(outputs: Any) -> Iterator[Any]:
    """Yield the leaves of a module's outputs, including fields of dataclasses: DDP searches those too."""
    for leaf in leaves(outputs):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


class _Backward:
    """Notifies observers of each backward and calls a function at its end, from a callback of the autograd engine.

    The callback is queued when backward reaches the module's outputs, and not at a parameter. A reentrant checkpoint
    runs a nested backward, and a callback that is queued there is called at the end of the nested backward.
    """

    _is_training = False
    _start: Timestamp = 0
    _is_queued = False
    _is_closed = False

    def __init__(self, tracer: Tracer, on_end: Callable[[], None] | None, clock: StepClock | None) -> None:
        self._tracer = tracer
        self._on_end = on_end
        self._clock = clock

    def watch(self, outputs: Any, *, is_training: bool) -> None:
        """Watch the backward that will start at these outputs of a forward."""
        self._is_training = is_training
        if not is_in_backward():  # a checkpoint runs forwards within backward
            self._is_queued = False  # it is still True if the last backward raised
        for output in _leaves(outputs):
            # Skip a parameter that the module returns: hooks would accumulate on it.
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(self._begin)

    def close(self) -> None:
        """Stop calling, whatever backward is still to come."""
        self._is_closed = True

    def _begin(self, _: torch.Tensor) -> None:
        if not self._is_queued and not self._is_closed:
            if self._clock is not None and self._is_training:
                self._clock.before_backward()
            self._is_queued = True
            self._start = self._tracer.now()
            queue_callback(self._notify)

    def _notify(self) -> None:
        """Notify observers: all gradients are computed.

        `_end` must run after every callback that was queued during the backward, so it is queued now.
        """
        self._tracer.tell("backward", self._start, self._tracer.now())
        queue_callback(self._end)

    def _end(self) -> None:
        self._is_queued = False
        if self._clock is not None and self._is_training:
            self._clock.after_backward()
        if self._on_end is not None:  # it may read gradients, and FSDP writes the last ones in such a callback
            self._on_end()
