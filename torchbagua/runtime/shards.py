"""Modules with fully_shard: the parts that gather parameters, and this rank's shards of the parameters."""

import sys
from collections.abc import Iterable
from typing import Any

import torch


def sharded_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parts of `module`, which may include the module itself, to which fully_shard was applied, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing takes a second, and fully_shard has imported it
    if fsdp is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, fsdp.FSDPModule)}


def reshard(parts: Iterable[Any]) -> None:
    """Free the gathered parameters that a forward without backward may have left in these parts.

    While gathered parameters exist, the module lists them and computes with them, and ignores writes to its shards.
    """
    for part in parts:
        part.reshard()


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, of which this rank holds a shard."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, as a view of its memory. Return any other tensor unchanged."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def name_of_shard(name: str, tensor: torch.Tensor) -> str:
    """Return `name`, and for a DTensor also the number of this rank's shard."""
    if not is_shard(tensor):
        return name
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return f"{name}, shard {mesh.get_local_rank()} of {mesh.size()}"
