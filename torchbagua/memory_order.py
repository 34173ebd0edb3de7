"""The order of a parameter's elements in a bucket: that of its memory, as DDP has it (channels_last, say).

Of a DTensor these are the elements, and this is the shape, of the shard that the rank holds.
"""

import torch

from torchbagua.shards import local_shard


def flat_length(parameter: torch.Tensor) -> int:
    """Return the elements of `parameter` in a flat tensor: of a complex one, two for each."""
    return local_shard(parameter).numel() * (2 if parameter.is_complex() else 1)


def flatten_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of the parameter's shape, as one dimension in the order of the parameter's memory.

    A view, where its own memory has that order.
    """
    parameter = local_shard(parameter)
    if parameter.is_contiguous() and tensor.is_contiguous():  # most are, and this takes a third of the time
        return tensor.view(-1)
    return tensor.permute(_slowest_first(parameter)).reshape(-1)


def shape_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat`, what `flatten_like` makes, complex numbers as pairs, in the parameter's shape."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    parameter = local_shard(parameter)
    order = _slowest_first(parameter)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view(shape_in_memory(parameter)).permute(inverse)


def shape_in_memory(parameter: torch.Tensor) -> list[int]:
    """Return the sizes of the dimensions of `parameter`, that which lies slowest in a bucket first."""
    parameter = local_shard(parameter)
    return [parameter.shape[dim] for dim in _slowest_first(parameter)]


def _slowest_first(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions as they lie in memory; in their own order where the memory has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))
