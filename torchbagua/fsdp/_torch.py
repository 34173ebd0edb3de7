"""Private names of torch that FSDP2 needs: why, and the versions of torch in which they were checked.

tests/test_torch_private.py has a canary for each name.
"""

from typing import Any

import torch
import torch.distributed as dist

# FSDP2. A module on which fully_shard was called has a state with parameter groups, which communicate. Checked in 2.11
# to 2.13.


def fsdp_param_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that an FSDPModule communicates together; empty if it has no parameters."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def fsdp_shard_group(param_group: Any) -> dist.ProcessGroup | None:
    """Return the ranks over which its parameters are sharded; None if they are also, or only, replicated."""
    mesh_info = param_group.mesh_info
    if mesh_info.replicate_mesh_dim is not None:
        return None
    group: dist.ProcessGroup = mesh_info.shard_process_group
    return group


def fsdp_replicate_group(param_group: Any) -> dist.ProcessGroup | None:
    """Return the ranks over which its parameters are replicated; None if they are not."""
    mesh_info = param_group.mesh_info
    if mesh_info.replicate_mesh_dim is None:
        return None
    group: dist.ProcessGroup = mesh_info.replicate_process_group
    return group


def fsdp_shards(param_group: Any) -> list[tuple[torch.nn.Parameter, int]]:
    """Return its parameters, each with the padded length of a shard, in the order of a row in memory."""
    return [(param.sharded_param, param.padded_sharded_param_size.numel()) for param in param_group.fsdp_params]


def fsdp_modules(param_group: Any) -> list[torch.nn.Module]:
    """Return the modules on which one call of fully_shard has created this group."""
    return list(param_group.modules)


def fsdp_computed_with(param_group: Any) -> list[torch.nn.Parameter | None]:
    """Return the parameters with which it computes, in the order of a row; None before their first gather.

    Autograd writes their gradients, which FSDP takes away before it reduces them.
    """
    return [getattr(param, "_unsharded_param", None) for param in param_group.fsdp_params]


def fsdp_is_offloaded(param_group: Any) -> bool:
    """Return whether its sharded parameters are stored on the CPU and computed with on another device."""
    return any(param.offload_to_cpu for param in param_group.fsdp_params)


def fsdp_reduce_scatter(param_group: Any) -> tuple[Any, bool]:
    """Return the object that reduce-scatters its gradients, and whether it is torch's default."""
    comm = param_group._reduce_scatter_comm
    return comm, type(comm).__name__ == "DefaultReduceScatter"


def fsdp_all_reduce_hook(param_group: Any) -> Any:
    """Return the hook that is called with reduce-scattered gradients if FSDP2 has no replicas of its own, or None."""
    return param_group._all_reduce_hook


def fsdp_all_reduces(param_group: Any) -> bool:
    """Return whether `set_requires_all_reduce` asks to average gradients over replicas in this backward."""
    return bool(param_group.all_reduce_grads)


def fsdp_divide_factor(param_group: Any) -> float | None:
    """Return the factor given to `set_gradient_divide_factor`; None for the number of ranks."""
    factor: float | None = param_group.gradient_divide_factor
    return factor


def fsdp_all_gather(param_group: Any) -> tuple[Any, bool]:
    """Return the object that all-gathers its weights, and whether it is torch's default."""
    comm = param_group._all_gather_comm
    return comm, type(comm).__name__ == "DefaultAllGather"


def fsdp_gathered_dtypes(param_group: Any) -> set[torch.dtype]:
    """Return the dtypes in which its parameters are gathered; if there are several, they are gathered as bytes."""
    pairs = {(param.sharded_param.dtype, param.mp_policy.param_dtype) for param in param_group.fsdp_params}
    return {cast if cast is not None and dtype.is_floating_point else dtype for dtype, cast in pairs}


def fsdp_own_gathers(param_group: Any) -> list[tuple[torch.nn.Parameter, type]]:
    """Return its parameters of classes that define their own gather, `fsdp_pre_all_gather`, each with its class."""
    shards = [(param.sharded_param, param._sharded_local_tensor) for param in param_group.fsdp_params]
    return [(parameter, type(shard)) for parameter, shard in shards if hasattr(shard, "fsdp_pre_all_gather")]


# Collectives and gradients of sharded modules. Checked in 2.11 to 2.13.


def premultiplier(op: Any) -> float | None:
    """Return the factor of a PREMUL_SUM, or None for another operation: torch has no public access to either."""
    state = op.__getstate__()
    is_premultiplied = isinstance(state, tuple) and state[0] == dist.ReduceOp.PREMUL_SUM
    return float(state[1]) if is_premultiplied else None


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a hook is called in backward once the parameter's gradient is accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)


def work_of(future: "torch.futures.Future[Any]") -> dist.Work:
    """Return the Work that a process group written in Python returns for an operation; it completes with `future`."""
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


COLLECTIVES_WITH_GIL = tuple(
    name
    for name in (
        "allgather",
        "allgather_into_tensor_coalesced",
        "all_gather_single",
        "all_gather_single_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "recv_anysource",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    )
    if hasattr(dist.ProcessGroup, name)
)
"""The operations that a process group written in Python must define itself if it has C++ backends.

If such a group inherits an operation, torch holds the GIL while a backend starts it (PyProcessGroup.hpp, torch 2.15). A
backend's thread that frees a tensor may need the GIL while it holds the lock that the start takes: a deadlock.
"""
