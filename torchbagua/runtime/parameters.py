"""Parameters: the order of their elements in a bucket, which is that of their memory, and the shards of fully_shard.

DDP's buckets have the memory order too, for example channels_last. For a DTensor, elements and shape are those of the
shard that this rank holds.
"""

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


def flat_length(parameter: torch.Tensor) -> int:
    """Return the number of elements of `parameter` in a flat tensor. A complex element counts as two."""
    return local_shard(parameter).numel() * (2 if parameter.is_complex() else 1)


def flatten_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of the parameter's shape, as a vector in the parameter's current memory order.

    The vector is a view if `tensor` has that memory order.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():  # the common case, in a tenth of the time
        return tensor.view(-1)
    return MemoryOrder(parameter).flatten(tensor)


class MemoryOrder:
    """The order of a parameter's elements in memory at construction. Later changes of the parameter do not affect it.

    Code that writes to a flat tensor and code that later reads it use the same MemoryOrder, so that the elements match.
    The user may call `.to(memory_format=torch.channels_last)` between the two.

    Args:
        parameter: the parameter with this order.

    Attributes:
        strides: the strides of the parameter at construction.
        sizes: the sizes of its dimensions, the slowest-varying in memory first.
    """

    __slots__ = ("_inverse", "_is_complex", "_is_contiguous", "_key", "_slowest_first", "sizes", "strides")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._is_complex = parameter.is_complex()
        self.strides = parameter.stride()
        parameter = local_shard(parameter)
        self._is_contiguous = parameter.is_contiguous()
        self._slowest_first = order = _slowest_first(parameter)
        self._inverse = sorted(range(len(order)), key=order.__getitem__)
        self.sizes = [parameter.shape[dim] for dim in order]
        # A dimension of size 1 may have any position in the order.
        self._key = [dim for dim in order if parameter.shape[dim] > 1]

    def __repr__(self) -> str:
        """Return the dimensions of size above 1, slowest first. Equal orders have the same representation."""
        return f"MemoryOrder({self._key})"

    @property
    def is_natural(self) -> bool:
        """Whether the memory order is the order of the dimensions, as in a contiguous tensor."""
        return self._key == sorted(self._key)

    def matches(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of the parameter's shape, has this memory order."""
        return tensor.stride() == self.strides or MemoryOrder(tensor)._key == self._key

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of the parameter's shape, as a vector in this order.

        The vector is a view if `tensor` has this memory order.
        """
        if self._is_contiguous and tensor.is_contiguous():  # the common case, in a third of the time
            return tensor.view(-1)
        return tensor.permute(self._slowest_first).reshape(-1)

    def shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, a vector as from `flatten`, with complex numbers as pairs, viewed in the parameter's shape."""
        if self._is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.view(self.sizes).permute(self._inverse)


def _slowest_first(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions in memory order, slowest first; in natural order if the memory has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))
