"""What attach does to a DistributedDataParallel module: its one communication hook, or its silence."""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.comm_hook import comm_hook


def silenced(module: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> ExitStack:
    """Keep DDP from sending gradients and buffers until what is returned is closed."""

    def silence() -> None:
        # What no_sync sets, and what it leads to a forward later.
        for attribute in ("require_backward_grad_sync", "require_forward_param_sync"):
            restore.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, False)

    def silence_after_step(*_: Any) -> None:
        first_step.remove()
        silence()

    restore = ExitStack()
    # With static_graph DDP learns the graph in its first backward, and fails (torch 2.13) where that one sends nothing.
    if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
        first_step = optimizer.register_step_post_hook(silence_after_step)
        restore.callback(first_step.remove)
    else:
        silence()
    return restore


class Trampoline:
    """What DDP holds as its one hook's state for ever: the algorithm that is attached now, or none."""

    module_id: int | None = None
    process_group: dist.ProcessGroup | None = None
    impl: AlgorithmImpl | None = None

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module_id = id(module)
        self.process_group = module.process_group

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the module lists this hook, but its reducer does not have it (torch 2.13)."""
        return {}


def _trampoline_hook(state: Trampoline, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if state.impl is None:
        assert state.process_group is not None  # only a copy has none, and no reducer calls that
        return allreduce_hook(state.process_group, bucket)
    return comm_hook(state.impl, bucket)


def check_no_foreign_hook(module: DistributedDataParallel) -> None:
    """Raise ValueError where `module` has a communication hook that is not ours."""
    # DDP's own list of its hooks; there is no public way to ask whether one is registered.
    for hook, state in module._comm_hooks:
        if not isinstance(state, Trampoline):
            raise ValueError(
                f"attach: the module has the communication hook {hook.__qualname__} already, and DDP takes only one; "
                "wrap the model again without it"
            )


def trampoline_of(module: DistributedDataParallel) -> Trampoline:
    """Return the module's trampoline, which the first attach registers."""
    for _, state in module._comm_hooks:
        assert isinstance(state, Trampoline)  # check_no_foreign_hook has refused any other
        if state.module_id == id(module):
            return state
    module._comm_hooks.clear()
    trampoline = Trampoline(module)
    try:
        module.register_comm_hook(trampoline, _trampoline_hook)
    except RuntimeError as error:
        module._comm_hooks.clear()  # where DDP has entered the hook before it refused it
        raise ValueError(f"attach: DDP takes no communication hook for this module: {error}") from error
    return trampoline
