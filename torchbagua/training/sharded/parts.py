"""Parts on which fully_shard was called: over which ranks they are sharded, and which of them attach takes."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torchbagua._torch import (
    fsdp_all_reduce_hook,
    fsdp_is_offloaded,
    fsdp_param_groups,
    fsdp_reduce_scatter,
    fsdp_shard_group,
    fsdp_shards,
)
from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.gradient.bytegrad import ByteGradAlgorithm
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedAllReduceAlgorithm


def sharding_group(parts: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the ranks over which the gradients of all parts are reduce-scattered.

    Raises:
        ValueError: a part is sharded in a way that is not supported.
    """
    groups = []
    for name, part in parts.items():
        what = name or "the module"
        param_groups = fsdp_param_groups(part)
        if len(param_groups) > 1:
            raise ValueError(
                f"attach: {what} has {len(param_groups)} parameter groups on meshes of their own, for which torch "
                "takes no custom reduce-scatter; call fully_shard without shard_placement_fn's meshes"
            )
        for param_group in param_groups:
            group = fsdp_shard_group(param_group)
            if group is None:
                raise ValueError(
                    f"attach: {what} is replicated ({type(part).__name__}), by an all-reduce of torch's own. Either "
                    "call fully_shard with the mesh's dimension of shards alone, and attach with "
                    "replicate_group=mesh.get_group(...) of that of replicas; or leave out attach, and make the mesh "
                    "with torchbagua.fsdp.register_backend, which replicate() needs"
                )
            if fsdp_is_offloaded(param_group):
                raise ValueError(f"attach: {what} has an OffloadPolicy that keeps parameters on the CPU; shard without")
            for parameter, _ in fsdp_shards(param_group):
                if (mesh := parameter.device_mesh).ndim != 1:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"attach: {what} has parameters on a mesh of {mesh.ndim} dimensions, as of tensor parallelism; "
                        "supported is fully_shard alone, with a mesh of one"
                    )
            groups.append(group)
    if not groups:
        raise ValueError("attach: no part on which fully_shard was called has parameters")
    if any(group is not groups[0] for group in groups):
        raise ValueError("attach: all parts must be sharded over one group, got fully_shard with several meshes")
    return groups[0]


def check_sharded(caller: str, algorithm: Algorithm) -> None:
    """Raise ValueError where gradients of sharded modules are not communicated by `algorithm`."""
    name = type(algorithm).__name__
    if not isinstance(algorithm, ByteGradAlgorithm | CompressedAllReduceAlgorithm):
        raise ValueError(
            f"{caller}: {name} does not take modules on which fully_shard was called; ByteGradAlgorithm and "
            "CompressedAllReduceAlgorithm do"
        )
    if algorithm.error_feedback:
        raise ValueError(
            f"{caller}: {name}: error_feedback must be False for modules on which fully_shard was called: every rank "
            "would keep a residual of all parameters, and not of its shard"
        )
    if not algorithm.average:
        raise ValueError(
            f"{caller}: {name}: average must be True for modules on which fully_shard was called, which say themselves "
            "by what to divide: set_gradient_divide_factor(1)"
        )


def check_reduce_scatters(parts: Mapping[str, Any]) -> None:
    """Raise ValueError where one of these parts has a reduce-scatter of its own."""
    for part_name, part in parts.items():
        for comm, is_torchs in map(fsdp_reduce_scatter, fsdp_param_groups(part)):
            if not is_torchs:
                raise ValueError(
                    f"attach: {part_name or 'the module'} has the reduce-scatter {type(comm).__name__} already; leave "
                    "out set_custom_reduce_scatter, set_symm_mem_for_comm and "
                    "set_allocate_memory_from_process_group_for_comm, and detach what is attached to a module around it"
                )


def check_all_reduce_hooks(parts: Mapping[str, Any]) -> None:
    """Raise ValueError where one of these parts has an all-reduce hook already, which replicas need."""
    for part_name, part in parts.items():
        for hook in map(fsdp_all_reduce_hook, fsdp_param_groups(part)):
            if hook is not None:
                raise ValueError(
                    f"attach: {part_name or 'the module'} has the all-reduce hook {hook!r} already, and "
                    "replicate_group needs one; leave out set_all_reduce_hook, and detach what is attached to a "
                    "module around it"
                )
