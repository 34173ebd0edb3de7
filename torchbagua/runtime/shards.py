"""What fully_shard makes of a module: parts that gather parameters, and parameters of which a rank holds a shard."""

import sys
from collections.abc import Iterable
from typing import Any

import torch


def sharded_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parts of `module`, itself among them, on which fully_shard was called, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second, and whoever has such a part did so
    if fsdp is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, fsdp.FSDPModule)}


def reshard(parts: Iterable[Any]) -> None:
    """Free the gathered parameters that a forward without backward has left in some of these parts.

    As long as there are some, the module lists those, and computes with them whatever is written to its shards.
    """
    for part in parts:
        part.reshard()


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor, of which this rank holds a shard."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`: of a DTensor its shard, in the same memory; of any other all of it."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def name_of_shard(name: str, tensor: torch.Tensor) -> str:
    """Return `name`, and if `tensor` is a DTensor which shard of it this rank holds."""
    if not is_shard(tensor):
        return name
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return f"{name}, shard {mesh.get_local_rank()} of {mesh.size()}"
