"""What attach does to a DistributedDataParallel module: its one communication hook, or its silence."""

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

JOIN_REFUSAL = (
    "an algorithm that averages weights does not take torch.distributed.algorithms.Join, in which ranks that have run "
    "out of data go on sending zeros for gradients; AsyncModelAverageAlgorithm lets ranks take different numbers of "
    "steps without it"
)

_HELD = "_torchbagua_hook"  # on a DDP

Hook = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `module`, by name."""
    return chain(module.named_parameters(), module.named_buffers())


def check_around(module: torch.nn.Module, ddp: DistributedDataParallel) -> None:
    """Raise ValueError where an algorithm cannot take the place of `ddp` around `module`: it trains more than that."""
    own = {id(parameter) for parameter in module.parameters()}
    others = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore and id(parameter) not in own
    ]
    if others:
        raise ValueError(
            f"attach: module must be the DistributedDataParallel around {type(module).__name__}, which averages "
            f"gradients of {len(others)} other parameters too, the first {others[0]}; or wrap {type(module).__name__} "
            "alone"
        )


def ddp_sync_disabled(ddp: DistributedDataParallel) -> ExitStack:
    """Keep `ddp` from sending gradients and buffers until what is returned is closed, whatever the loop sets."""

    def disable(module: torch.nn.Module, inputs: Any) -> None:
        if module is not ddp:  # a copy has this hook too
            return
        if is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")
        # What no_sync sets, and what that leads to a forward later. Loops that accumulate gradients set the first one
        # themselves before each forward, and DDP reads it in forward only.
        turn_off()
        ddp.require_backward_grad_sync = not has_learnt_graph(ddp)

    before = dict.fromkeys(("require_backward_grad_sync", "require_forward_param_sync"), False)

    def turn_off() -> None:
        for attribute in before:
            before[attribute] |= getattr(ddp, attribute)
            setattr(ddp, attribute, False)

    def turn_on() -> None:
        for attribute, was_on in before.items():
            setattr(ddp, attribute, was_on)

    with ExitStack() as undo:  # closed here only where one of these steps raises
        undo.callback(turn_on)
        disable(ddp, ())  # its forward may be under way
        undo.callback(ddp.register_forward_pre_hook(disable).remove)
        # Where DDP averages all the same, the hook leaves the gradients as they are: in the first backward of a static
        # graph, which fails otherwise (torch 2.13), and where the attribute is set between forward and backward, as
        # accelerate's trigger_sync_in_backward does.
        undo.enter_context(hooked(ddp, _keep_gradients))
        return undo.pop_all()


def ddp_within_nodes(ddp: DistributedDataParallel, hook: Hook | None) -> ExitStack:
    """Have `ddp` average gradients within the node, and refuse Join, until what is returned is closed.

    Where it is of all ranks, it sends what `hook` sends of gradients and no buffers. In the second forward it still
    forms its buckets anew, for which it hears from rank 0. None: it is of the node's ranks, and goes on as it is.
    """

    def refuse_join(module: torch.nn.Module, inputs: Any) -> None:
        if module is ddp and is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")

    with ExitStack() as undo:
        undo.callback(ddp.register_forward_pre_hook(refuse_join).remove)
        if hook is not None:
            undo.callback(setattr, ddp, "broadcast_buffers", ddp.broadcast_buffers)
            ddp.broadcast_buffers = False
            undo.enter_context(hooked(ddp, hook))
        return undo.pop_all()


def _keep_gradients(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[] if flat.is_cpu else [flat.device])
    future.set_result(flat)
    return future


class HeldHook:
    """What holds a hook, on the DDP that calls it: a hook may lead back to the DDP, and both are garbage together."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave None in a copy."""
        return type(None), ()


class Trampoline:
    """What DDP holds as its one hook's state for ever: the hook that is attached now, or none.

    Weakly, since the reducer's references are not seen by the garbage collector.
    """

    module_id: int | None = None
    process_group: dist.ProcessGroup | None = None
    held: weakref.ref[HeldHook] | None = None

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module_id = id(module)
        self.process_group = module.process_group

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the module lists this hook, but its reducer does not have it (torch 2.13)."""
        return {}


def _trampoline_hook(state: Trampoline, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    held = None if state.held is None else state.held()
    if held is None:
        assert state.process_group is not None  # only a copy has none, and no reducer calls that
        return allreduce_hook(state.process_group, bucket)
    return held.hook(bucket)


def check_no_foreign_hook(module: DistributedDataParallel) -> None:
    """Raise ValueError where `module` has a communication hook that is not ours."""
    for hook, state in comm_hooks_of(module):
        if not isinstance(state, Trampoline):
            raise ValueError(
                f"attach: the module has the communication hook {hook.__qualname__} already, and DDP takes only one; "
                "wrap the model again without it"
            )


def hooked(module: DistributedDataParallel, hook: Hook) -> ExitStack:
    """Have DDP call `hook` with its gradient buckets until what is returned is closed; then it takes the plain mean."""
    trampoline = _trampoline_of(module)
    held = HeldHook(hook)
    setattr(module, _HELD, held)
    trampoline.held = weakref.ref(held)
    undo = ExitStack()
    undo.callback(delattr, module, _HELD)
    undo.callback(setattr, trampoline, "held", None)
    return undo


def _trampoline_of(module: DistributedDataParallel) -> Trampoline:
    """Return the module's trampoline, which is registered when it is first needed."""
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
        hooks.clear()  # where DDP has entered the hook before it refused it
        raise ValueError(f"attach: DDP takes no communication hook for this module: {error}") from error
    return trampoline
