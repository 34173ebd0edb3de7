"""Registers a backend for the replicas of sharded modules, and aligns its blocks with parameters."""

from functools import partial

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_reduce_scatter, fsdp_replicate_group
from torchbagua.algorithms.base import Algorithm
from torchbagua.fsdp.backend import Announcer, ReplicaGroup
from torchbagua.runtime.parameters import reshard, sharded_parts
from torchbagua.training.fsdp2.checks import shard_codecs
from torchbagua.training.fsdp2.rows import check_parameters_inside, communicating_parts
from torchbagua.training.fsdp2.same_rows import SameRows


def register_backend(algorithm: Algorithm, *, name: str = "torchbagua") -> None:
    """Register a torch.distributed backend whose groups average gradients with an algorithm, for the replicas of HSDP.

    Use it for a mesh on which FSDP itself has replicas: with `fully_shard` on two dimensions, or with `replicate`:

        torchbagua.fsdp.register_backend(tb.ByteGradAlgorithm())
        mesh = init_device_mesh(
            "cuda", (2, 8), mesh_dim_names=("replicas", "shards"), backend_override={"replicas": "torchbagua"}
        )
        fully_shard(model, mesh=mesh)
        torchbagua.fsdp.align_blocks(model)

    A group of this backend compresses each all-reduce, sum or mean, of a flat floating-point tensor, including your own
    all-reduces. Metrics stay exact if they are tensors without dimensions, or are reduced over another group. Torch's
    own backends run all other operations, such as the reduce-scatter. Register on all ranks, before the mesh is
    created.

    Args:
        algorithm: a gradient algorithm that supports sharded modules, with `average=True` and without error feedback.
            FSDP determines whether it needs the sum or the mean. `hierarchical` refers to the nodes of the replicas.
        name: the backend's name in `backend_override`. It must not be taken in this process.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"register_backend: algorithm must be an Algorithm, got {algorithm!r}")
    codecs = shard_codecs("register_backend", algorithm)
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"register_backend: name must be a lower-case identifier, got {name!r}")
    if name in dist.Backend.backend_list:
        raise ValueError(f"register_backend: name {name!r} is taken; use another name, also in backend_override")
    dist.Backend.register_backend(name, partial(ReplicaGroup, algorithm, codecs), devices=["cpu", "cuda"])


def align_blocks(module: torch.nn.Module) -> None:
    """Align blocks with parameters in a module's all-reduces over groups of `register_backend`.

    Call it after fully_shard or replicate. Without it a group does not know the parameters: they share blocks, small
    values lose precision, and a RuntimeWarning reports it. It installs a reduce-scatter, which calls the previous one.
    Call it on all ranks.

    Raises:
        ValueError: no part of the module has replicas over a group of such a backend.
    """
    compared: dict[ReplicaGroup, SameRows] = {}
    parts = sharded_parts(module)
    reshard(parts.values())  # an evaluation may have left the full parameters in the module
    communicating = communicating_parts(module, parts)
    check_parameters_inside(module, communicating)
    for part in communicating:
        group = fsdp_replicate_group(part.param_group)
        if isinstance(group, ReplicaGroup):
            if group not in compared:
                compared[group] = group.compare_rows(communicating)
            comm = fsdp_reduce_scatter(part.param_group)[0]
            part.part.set_custom_reduce_scatter(Announcer(comm, part, group, compared[group]))
            part.watch_gradients()
    if not compared:
        raise ValueError(
            "align_blocks: no part of the module has replicas over a group of register_backend; create the mesh with "
            "backend_override, and call fully_shard or replicate first"
        )
