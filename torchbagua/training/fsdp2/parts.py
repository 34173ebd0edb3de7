"""Finds the ranks over which parts of a module are sharded, and rejects parts that attach does not support."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torchbagua._torch import (
    fsdp_is_offloaded,
    fsdp_param_groups,
    fsdp_shard_group,
    fsdp_shards,
)


def sharding_group(parts: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the ranks over which the gradients of all parts are reduce-scattered."""
    groups = []
    for name, part in parts.items():
        label = name or "the module"
        param_groups = fsdp_param_groups(part)
        if len(param_groups) > 1:
            raise ValueError(
                f"attach: {label} has {len(param_groups)} parameter groups on separate meshes, for which torch "
                "takes no custom reduce-scatter; call fully_shard without shard_placement_fn's meshes"
            )
        for param_group in param_groups:
            group = fsdp_shard_group(param_group)
            if group is None:
                raise ValueError(
                    f"attach: {label} is replicated ({type(part).__name__}) by torch's own all-reduce. Either call "
                    "fully_shard with the mesh's shard dimension only, and torchbagua.fsdp.attach with "
                    "replicate_group=mesh.get_group(...) of the replica dimension; or leave out attach, and create the "
                    "mesh with torchbagua.fsdp.register_backend, which replicate() needs"
                )
            if fsdp_is_offloaded(param_group):
                raise ValueError(
                    f"attach: {label} has an OffloadPolicy that keeps parameters on the CPU; call "
                    "fully_shard without it"
                )
            for parameter, _ in fsdp_shards(param_group):
                if (mesh := parameter.device_mesh).ndim != 1:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"attach: {label} has parameters on a mesh of {mesh.ndim} dimensions, for instance of tensor "
                        "parallelism; only fully_shard with a mesh of one dimension is supported"
                    )
            groups.append(group)
    if not groups:
        raise ValueError("attach: no part on which fully_shard was called has parameters")
    if any(group is not groups[0] for group in groups):
        raise ValueError("attach: all parts must be sharded over one group, got fully_shard with several meshes")
    return groups[0]
