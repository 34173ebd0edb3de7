"""A backend for the replicas of sharded modules: what a user calls before the mesh is made, and after fully_shard."""

from functools import partial

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_reduce_scatter, fsdp_replicate_group
from torchbagua.algorithms.base import Algorithm
from torchbagua.fsdp.backend import Announcer, ReplicaGroup
from torchbagua.runtime.shards import reshard, sharded_parts
from torchbagua.training.fsdp2.checks import shard_codecs
from torchbagua.training.fsdp2.rows import check_parameters_inside, communicating_parts


def register_backend(algorithm: Algorithm, *, name: str = "torchbagua") -> None:
    """Make a torch.distributed backend whose groups average gradients by an algorithm, for the replicas of HSDP.

    For a mesh on which FSDP itself keeps replicas, as of `fully_shard` with two dimensions, or of `replicate`:

        torchbagua.fsdp.register_backend(tb.ByteGradAlgorithm())
        mesh = init_device_mesh(
            "cuda", (2, 8), mesh_dim_names=("replicas", "shards"), backend_override={"replicas": "torchbagua"}
        )
        fully_shard(model, mesh=mesh)
        torchbagua.fsdp.align_blocks(model)

    A group of this backend compresses each all-reduce, sum or mean, of a flat floating-point tensor, also one of yours.
    Metrics are exact as tensors without a dimension, or over another group. Everything else, as the reduce-scatter,
    stays torch's own. Register on all ranks, before the mesh is made.

    Args:
        algorithm: one that averages gradients and takes sharded modules, with `average=True` and without error
            feedback. FSDP says whether it needs the sum or the mean. `hierarchical` is about the nodes of the replicas.
        name: what `backend_override` says; it must not be taken, in the whole process.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"register_backend: algorithm must be an Algorithm, got {algorithm!r}")
    codecs = shard_codecs("register_backend", algorithm)
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"register_backend: name must be a lower-case identifier, got {name!r}")
    if name in dist.Backend.backend_list:
        raise ValueError(f"register_backend: name {name!r} is taken; give another, and say it in backend_override too")
    dist.Backend.register_backend(name, partial(ReplicaGroup, algorithm, codecs), devices=["cpu", "cuda"])


def align_blocks(module: torch.nn.Module) -> None:
    """Have blocks end where parameters end, in what a module all-reduces over groups of `register_backend`.

    Call it after fully_shard or replicate. Without it a group sees no parameters: these share blocks, small ones lose
    precision, and a RuntimeWarning says so. It sets a reduce-scatter, which hands everything to the one before.

    Raises:
        ValueError: no part of the module has replicas over a group of such a backend.
    """
    found = False
    parts = sharded_parts(module)
    reshard(parts.values())  # an evaluation may have left parameters gathered, and the module's own
    communicating = communicating_parts(module, parts)
    check_parameters_inside(module, communicating)
    for part in communicating:
        group = fsdp_replicate_group(part.param_group)
        if isinstance(group, ReplicaGroup):
            found = True
            part.part.set_custom_reduce_scatter(Announcer(fsdp_reduce_scatter(part.param_group)[0], part, group))
    if not found:
        raise ValueError(
            "align_blocks: no part of the module has replicas over a group of register_backend; make the mesh with "
            "backend_override, and call fully_shard or replicate first"
        )
