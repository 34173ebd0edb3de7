"""Installs an impl's hooks in the training step: on the module, gradients, the end of backward, and optimizers."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua._torch import is_in_backward, leaves, queue_callback
from torchbagua.observe.clocks import Timestamp
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.runner import Runner
from torchbagua.training.ddp import ModuleHook
from torchbagua.training.lint import install_lints
from torchbagua.training.setup import TrainingSetup
from torchbagua.training.step_clock import StepClock


def install_step_hooks(
    setup: TrainingSetup,
    runner: Runner,
    *,
    after_first_step: Callable[[], None],
) -> tuple[ExitStack, StepClock]:
    """Install the hooks that the impl asks for. Return a stack that removes them when it is closed, and the clock.

    Args:
        setup: the training loop. The hooks are installed on its modules, gradients and optimizers, and the optimizers'
            steps drive the clock.
        runner: its impl provides the hooks. With a weight algorithm, it also decides which steps the GradScaler skips:
            with the decentralized algorithms all ranks skip together, with asynchronous averaging each rank alone.
        after_first_step: called within the optimizer's `step`, since it searches the call stack for a GradScaler.
    """
    wrappers, module, impl = setup.called, setup.inner, runner.impl
    on_forward = impl.init_forward_pre_hook(module)
    on_gradient = impl.init_backward_hook(module)
    on_backward_end = impl.init_post_backward_hook(module)
    on_step = impl.init_post_optimizer_step_hook(module)

    loss_scale = None
    if setup.grad_scaler is not None and runner.needs_grad_scaler and not runner.averages_weights:
        from torchbagua.training.grad_scaler import LossScale

        loss_scale = LossScale(setup.grad_scaler, runner.process_group.wait_for_mark)
        runner.read_loss_scale = loss_scale.read

    # A shallow copy of a wrapper shares its hooks, but they must act on the original only.
    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if module in wrappers and module.training and torch.is_grad_enabled():
            if on_forward is not None:
                on_forward(inputs)
            if loss_scale is not None and not torch.compiler.is_compiling():  # the compiler would trace stream calls
                loss_scale.fetch()

    is_first = True

    def end_step(optimizer: torch.optim.Optimizer) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            after_first_step()
        try:
            if runner.averages_weights:
                runner.refuse_capture()
                runner.reset_if_needed()
            if on_step is not None:
                on_step(optimizer)
        finally:
            # Only after on_step, in which the algorithm may wait for communication of this step.
            runner.tracer.end_step()

    must_step = runner.averages_weights and on_step is not None  # it averages only when a step ends
    needs_steps = on_step is not None or runner.averages_weights or runner.needs_grad_scaler or runner.tracer.is_on
    clock = StepClock(
        runner.step_watches if needs_steps else [],
        end_step,
        raises_if_never_stepped=must_step,
        check_gradients=setup.check_gradients,
    )
    runner.tracer.has_optimizer = True
    with ExitStack() as handles:  # closed here only if an installation raises
        handles.callback(clock.close)
        handles.enter_context(install_lints(setup, runner))
        if on_forward is not None or loss_scale is not None:
            for wrapper in wrappers:
                handles.callback(wrapper.register_forward_pre_hook(ModuleHook(before_forward)).remove)
        if on_backward_end is not None or must_step or runner.tracer.is_on:
            backward = _Backward(runner.tracer, on_backward_end, clock if must_step else None)
            handles.callback(backward.close)

            def after_forward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
                if module in wrappers:
                    backward.watch(outputs, is_training=any(wrapper.training for wrapper in wrappers))

            for wrapper in wrappers:
                handles.callback(wrapper.register_forward_hook(ModuleHook(after_forward)).remove)
        if on_gradient is not None:
            for name, parameter in setup.trained().items():
                handles.callback(parameter.register_post_accumulate_grad_hook(partial(on_gradient, name)).remove)
        if setup.grad_scaler is not None and runner.averages_weights:
            from torchbagua.training.grad_scaler import install_overflow_agreement

            handles.enter_context(install_overflow_agreement(setup.grad_scaler, setup.optimizers, runner, clock))
        return handles.pop_all(), clock


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

    def __init__(self, tracer: Tracer, on_end: Callable[[], None] | None, clock: StepClock | None) -> None:
        self._tracer = tracer
        self._on_end = on_end
        self._clock = clock
        self._is_training = False
        self._start: Timestamp = 0
        self._is_queued = False
        self._is_closed = False

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
