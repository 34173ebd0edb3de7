"""Parts on which fully_shard was called: over which ranks they are sharded, and which of them attach takes."""

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
                    "call fully_shard with the mesh's dimension of shards alone, and torchbagua.fsdp.attach with "
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
