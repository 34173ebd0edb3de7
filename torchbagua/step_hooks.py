"""Where an impl's hooks enter the training step: module, gradients, end of backward, optimizer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua.algorithms.base import AlgorithmImpl


def install_step_hooks(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], impl: AlgorithmImpl
) -> ExitStack:
    """Install the hooks that `impl` asks for on `module` and `optimizers`; closing what is returned removes them."""
    inner = getattr(module, "module", module)
    on_forward = impl.init_forward_pre_hook(inner)
    on_gradient = impl.init_backward_hook(inner)
    on_backward_end = impl.init_post_backward_hook(inner)
    on_step = impl.init_post_optimizer_step_hook(inner)
    backward_end = None if on_backward_end is None else _BackwardEnd(on_backward_end)

    def before_forward(_: torch.nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if backward_end is not None:
            backward_end.is_queued = False  # it still is where the last backward raised
        if on_forward is not None:
            on_forward(inputs)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if impl.owns_buckets and impl.need_reset():
            impl.reset()
        if on_step is not None:
            on_step(optimizer)

    with ExitStack() as handles:  # closed here only where an installation raises
        if on_forward is not None or backward_end is not None:
            handles.callback(module.register_forward_pre_hook(before_forward).remove)
        for name, parameter in inner.named_parameters():
            if not parameter.requires_grad:
                continue
            if backward_end is not None:
                handles.callback(parameter.register_post_accumulate_grad_hook(backward_end.queue).remove)
            if on_gradient is not None:
                handles.callback(parameter.register_post_accumulate_grad_hook(partial(on_gradient, name)).remove)
        if on_step is not None or impl.owns_buckets:
            for optimizer in optimizers:
                handles.callback(optimizer.register_step_post_hook(after_step).remove)
        return handles.pop_all()


class _BackwardEnd:
    """Queues a callback with the autograd engine once in each backward."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self.is_queued = False

    def queue(self, _: torch.Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        self.is_queued = False
        self._callback()
