"""Installs a communication hook on a DistributedDataParallel module, or disables its communication."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import comm_hooks_of, has_learnt_graph, is_joining
from torchbagua.training.module_hook import ModuleHook

JOIN_REFUSAL = (
    "an algorithm that averages weights does not support torch.distributed.algorithms.Join, in which ranks that have "
    "run out of data keep sending zeros as gradients; AsyncModelAverageAlgorithm lets ranks take different numbers of "
    "steps without it"
)

_HELD = "_torchbagua_hook"  # on a DDP
_COPIED = "torchbagua: averaged by DDP"  # the state of the hook in the list of a copied DDP

Hook = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `module`, by name."""
    return chain(module.named_parameters(), module.named_buffers())


def check_around(module: torch.nn.Module, ddp: DistributedDataParallel) -> None:
    """Raise ValueError if `ddp` averages gradients outside of `module`, so that an algorithm cannot replace it."""
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore and id(parameter) not in own
    ]
    if foreign:
        raise ValueError(
            f"attach: module must be the DistributedDataParallel around {type(module).__name__}, which averages "
            f"gradients of {len(foreign)} other parameters too, the first {foreign[0]}; or wrap "
            f"{type(module).__name__} alone"
        )


class _Off(int):
    """False as the value of a flag, and True in a copy or pickle of the DDP, which has no algorithm attached."""

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (True,)


_OFF: Any = _Off()


def disable_ddp_sync(ddp: DistributedDataParallel) -> ExitStack:
    """Keep `ddp` from sending gradients and buffers until the returned stack is closed, whatever the loop sets."""

    def disable(module: torch.nn.Module, inputs: Any) -> None:
        if module is not ddp:  # a shallow copy shares this hook
            return
        if is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")
        # no_sync sets the first attribute, and DDP's next forward then sets the second. Loops that accumulate gradients
        # set the first attribute before each forward, and DDP reads it only in forward.
        turn_off()
        if not has_learnt_graph(ddp):
            ddp.require_backward_grad_sync = True

    before = dict.fromkeys(("require_backward_grad_sync", "require_forward_param_sync"), False)

    def turn_off() -> None:
        for attribute in before:
            before[attribute] |= bool(getattr(ddp, attribute))
            setattr(ddp, attribute, _OFF)

    def turn_on() -> None:
        for attribute, was_on in before.items():
            setattr(ddp, attribute, was_on)

    with ExitStack() as undo:  # closed here only if one of these steps raises
        undo.callback(turn_on)
        disable(ddp, ())  # its forward may be running
        undo.callback(ddp.register_forward_pre_hook(ModuleHook(disable)).remove)
        # DDP still calls its hook in two cases, in which the hook must leave the gradients unchanged: in the first
        # backward of a static graph, which fails otherwise (torch 2.13), and if the attribute is set between forward
        # and backward, as accelerate's trigger_sync_in_backward does.
        undo.enter_context(install_hook(ddp, _keep_gradients))
        return undo.pop_all()


def limit_ddp_to_nodes(ddp: DistributedDataParallel, hook: Hook | None) -> ExitStack:
    """Have `ddp` average gradients within the node, and refuse Join, until the returned stack is closed.

    Args:
        ddp: over all ranks, or over the ranks of the node.
        hook: communicates the gradients if `ddp` is over all ranks. DDP then sends no buffers. It still rebuilds its
            buckets in the second forward, for which rank 0 broadcasts the order. None if `ddp` is over the ranks of the
            node: its communication does not change.
    """

    def refuse_join(module: torch.nn.Module, inputs: Any) -> None:
        if module is ddp and is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")

    with ExitStack() as undo:
        undo.callback(ddp.register_forward_pre_hook(ModuleHook(refuse_join)).remove)
        if hook is not None:
            undo.callback(setattr, ddp, "broadcast_buffers", ddp.broadcast_buffers)
            ddp.broadcast_buffers = _OFF if ddp.broadcast_buffers else False
            undo.enter_context(install_hook(ddp, hook))
        return undo.pop_all()


def _keep_gradients(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[] if flat.is_cpu else [flat.device])
    future.set_result(flat)
    return future


class HeldHook:
    """Owns a hook, as an attribute of the DDP that calls it.

    A hook may refer to the DDP. The garbage collector then frees both together.
    """

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Become None in a copy."""
        return type(None), ()


class Trampoline:
    """The state of the single hook that DDP keeps for its lifetime. It refers to the attached hook, if any.

    The reference is weak, since the garbage collector does not see the reducer's references.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module_id = id(module)
        self.process_group = module.process_group
        self.held: weakref.ref[HeldHook] | None = None


class _Listed(tuple[Any, Any]):
    """The hook and its state in DDP's list. A copy of the DDP has the list, but no hook in its reducer (torch 2.13)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((allreduce_hook, _COPIED),)


def _trampoline_hook(state: Trampoline, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    held = None if state.held is None else state.held()
    if held is None:
        return allreduce_hook(state.process_group, bucket)
    return held.hook(bucket)


def check_no_foreign_hook(module: DistributedDataParallel) -> None:
    """Raise ValueError if `module` has a communication hook that torchbagua did not install."""
    for hook, state in comm_hooks_of(module):
        if not isinstance(state, Trampoline) and not (isinstance(state, str) and state == _COPIED):
            raise ValueError(
                f"attach: the module has the communication hook {hook.__qualname__} already, and DDP takes only one; "
                "wrap the model again without it"
            )


def install_hook(module: DistributedDataParallel, hook: Hook) -> ExitStack:
    """Have DDP call `hook` with its gradient buckets until the returned stack is closed; DDP then averages again."""
    trampoline = _trampoline_of(module)
    held = HeldHook(hook)
    setattr(module, _HELD, held)
    trampoline.held = weakref.ref(held)
    undo = ExitStack()
    undo.callback(delattr, module, _HELD)
    undo.callback(setattr, trampoline, "held", None)
    return undo


def _trampoline_of(module: DistributedDataParallel) -> Trampoline:
    """Return the module's trampoline; register it if the module has none yet."""
    check_no_foreign_hook(module)
    hooks = comm_hooks_of(module)
    for _, state in hooks:
        if isinstance(state, Trampoline) and state.module_id == id(module):
            return state
    hooks.clear()
    trampoline = Trampoline(module)
    try:
        module.register_comm_hook(trampoline, _trampoline_hook)
    except RuntimeError as error:
        hooks.clear()  # DDP may have listed the hook before it rejected it
        raise ValueError(f"attach: DDP takes no communication hook for this module: {error}") from error
    hooks[:] = [_Listed(hooks[0])]
    return trampoline
