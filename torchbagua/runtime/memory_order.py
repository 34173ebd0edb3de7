"""The order of a parameter's elements in a bucket: that of its memory, as DDP has it (channels_last, say).

Of a DTensor these are the elements, and this is the shape, of the shard that the rank holds.
"""

import torch

from torchbagua.runtime.shards import local_shard


def flat_length(parameter: torch.Tensor) -> int:
    """Return the elements of `parameter` in a flat tensor: of a complex one, two for each."""
    return local_shard(parameter).numel() * (2 if parameter.is_complex() else 1)


def flatten_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of the parameter's shape, as one dimension in the order that the parameter's memory has now.

    A view, if its own memory has that order.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():  # most are, and this takes a tenth of the time
        return tensor.view(-1)
    return MemoryOrder(parameter).flatten(tensor)


class MemoryOrder:
    """The order of a parameter's elements in memory. It stays as it was made if the parameter's memory changes.

    What writes to a flat tensor and what reads from it later use one of these, so that each element is found again.
    `.to(memory_format=torch.channels_last)` may come between the two.

    Args:
        parameter: whose order it is.

    Attributes:
        strides: of the parameter when this was made.
        sizes: of its dimensions, the one that lies slowest in memory first.
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
        # Dimensions of one element may lie anywhere.
        self._key = [dim for dim in order if parameter.shape[dim] > 1]

    def __repr__(self) -> str:
        """Return the dimensions of more than one element, slowest first: the same for all that is in this order."""
        return f"MemoryOrder({self._key})"

    @property
    def is_natural(self) -> bool:
        """Whether elements lie in the order of the dimensions, as in a contiguous tensor."""
        return self._key == sorted(self._key)

    def is_that_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the elements of `tensor`, of the parameter's shape, lie in this order."""
        return tensor.stride() == self.strides or MemoryOrder(tensor)._key == self._key

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of the parameter's shape, as one dimension in this order.

        A view, if its own memory has this order.
        """
        if self._is_contiguous and tensor.is_contiguous():  # most are, and this takes a third of the time
            return tensor.view(-1)
        return tensor.permute(self._slowest_first).reshape(-1)

    def shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat`, what `flatten` makes, complex numbers as pairs, in the parameter's shape."""
        if self._is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.view(self.sizes).permute(self._inverse)


def _slowest_first(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions as they lie in memory; in their own order where the memory has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))
