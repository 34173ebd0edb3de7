"""Where an impl's hooks enter the training step: module, gradients, end of backward, GradScaler, optimizer."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.gpu_clock import Moment
from torchbagua.tracer import Tracer

# On a GradScaler that attachments have been given.
_IMPLS_OF_SCALER = "_torchbagua_impls"


def install_step_hooks(
    wrapper: torch.nn.Module,
    module: torch.nn.Module,
    trained: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    impl: AlgorithmImpl,
) -> ExitStack:
    """Install the hooks that `impl` asks for; closing what is returned removes them.

    Args:
        wrapper: whose forward the user calls.
        module: what `impl` knows as its module, inside the wrapper or the wrapper itself.
        trained: the parameters to hear of, by name.
        optimizer: whose steps are the clock.
        impl: asked for its hooks.
    """
    on_forward = impl.init_forward_pre_hook(module)
    on_gradient = impl.init_backward_hook(module)
    on_backward_end = impl.init_post_backward_hook(module)
    on_step = impl.init_post_optimizer_step_hook(module)

    # A copy of the wrapper has the same hooks, and they are not meant for it.
    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if on_forward is not None and module is wrapper and wrapper.training and torch.is_grad_enabled():
            on_forward(inputs)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        impl.tracer.end_step()  # what an algorithm does now, beside the next step, is part of that one
        if impl.owns_buckets and impl.need_reset():
            impl.reset()
        if on_step is not None:
            on_step(optimizer)

    impl.tracer.has_optimizer = True
    with ExitStack() as handles:  # closed here only where an installation raises
        if on_forward is not None:
            handles.callback(wrapper.register_forward_pre_hook(before_forward).remove)
        if on_backward_end is not None or impl.tracer.is_on:
            backward = _Backward(impl.tracer, on_backward_end)
            handles.callback(backward.close)

            def after_forward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
                if module is wrapper:
                    backward.watch(outputs)

            handles.callback(wrapper.register_forward_hook(after_forward).remove)
        if on_gradient is not None:
            for name, parameter in trained.items():
                handles.callback(parameter.register_post_accumulate_grad_hook(partial(on_gradient, name)).remove)
        if on_step is not None or impl.owns_buckets or impl.tracer.is_on:
            handles.callback(optimizer.register_step_post_hook(after_step).remove)
        return handles.pop_all()


def agree_on_overflow(
    scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer], impl: AlgorithmImpl
) -> ExitStack:
    """Let `impl` decide what `scaler` takes for an overflow of `optimizers`, until what is returned is closed.

    Every way on which GradScaler looks for Inf leads through its `_unscale_grads_` (torch 2.11 to 2.13), which has no
    public hook.
    """
    # Several attachments may share a scaler, and end in any order: the impl of each optimizer that is attached.
    impls: dict[int, AlgorithmImpl] = scaler.__dict__.setdefault(_IMPLS_OF_SCALER, {})
    if not impls:
        find_inf = scaler._unscale_grads_

        def find_inf_on_all_ranks(
            optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
        ) -> dict[torch.device, torch.Tensor]:
            found = find_inf(optimizer, *args, **kwargs)
            if id(optimizer) in impls:
                overflow = impls[id(optimizer)].agree_on_overflow(any(bool(one) for one in found.values()))
                for one in found.values():
                    one.fill_(float(overflow))
            return found

        scaler._unscale_grads_ = find_inf_on_all_ranks  # type: ignore[method-assign]
    own = {id(optimizer): impl for optimizer in optimizers}
    impls.update(own)

    def remove() -> None:
        for optimizer_id in own:
            del impls[optimizer_id]
        if not impls:
            del scaler._unscale_grads_, scaler.__dict__[_IMPLS_OF_SCALER]

    stack = ExitStack()
    stack.callback(remove)
    return stack


def _leaves(outputs: Any) -> Iterator[Any]:
    """Yield what a module's outputs are made of, dataclasses opened, as DDP looks for tensors in them."""
    for leaf in tree_leaves(outputs):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


class _Backward:
    """Tells of each backward, and calls a function at its end, from a callback that it queues with the autograd engine.

    It is queued when backward reaches the module's outputs and not at a parameter: a reentrant checkpoint runs a
    backward of its own within, and a callback that is queued there is called at the end of that one.
    """

    def __init__(self, tracer: Tracer, on_end: Callable[[], None] | None) -> None:
        self._tracer = tracer
        self._on_end = on_end
        self._start: Moment = 0
        self._is_queued = False
        self._is_closed = False

    def watch(self, outputs: Any) -> None:
        """Hear of the backward that will start at these outputs of a forward."""
        self._is_queued = False  # it still is where the last backward raised
        for output in _leaves(outputs):
            # Not a parameter that the module returns, on which hooks would pile up.
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(self._begin)

    def close(self) -> None:
        """Call no more, whatever backward is still to come."""
        self._is_closed = True

    def _begin(self, _: torch.Tensor) -> None:
        if not self._is_queued and not self._is_closed:
            self._is_queued = True
            self._start = self._tracer.now()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_queued = False
        self._tracer.tell("backward", self._start, self._tracer.now())
        if self._on_end is not None:
            self._on_end()
