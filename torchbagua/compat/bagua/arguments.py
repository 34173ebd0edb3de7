"""Checks of the arguments of the primitives: communicators and tensors."""

import torch
import torch.distributed as dist

from torchbagua.compat.bagua.process_groups import BaguaCommunicator, CommMember, _get_default_group


def group_of(comm: object) -> dist.ProcessGroup | None:
    """Return torch's group of a communicator, by default the world's; None if this rank is not a member."""
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if not isinstance(comm, BaguaCommunicator):
        raise TypeError(
            "torchbagua.compat.bagua: comm must be a communicator or None, got "
            f"{comm!r}; call the process group's get_global_communicator()"
        )
    return comm.group


def bare(
    where: str,
    name: str,
    tensor: torch.Tensor,
    num_elements: int | None = None,
    *,
    multiple_of: int = 1,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `tensor` as one dimension, detached from autograd; check it, and its dtype against `like`."""
    if like is not None and tensor.dtype != like.dtype:
        raise TypeError(f"{where}: {name} must be of {like.dtype}, like the other tensor, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{where}: {name} must be contiguous, got strides {tensor.stride()} of {list(tensor.shape)}")
    if num_elements is not None and tensor.numel() != num_elements:
        raise ValueError(f"{where}: {name} must have {num_elements} elements, got {tensor.numel()}")
    if tensor.numel() % multiple_of:
        raise ValueError(f"{where}: {name} must have a multiple of {multiple_of} elements, got {tensor.numel()}")
    return tensor.detach().view(-1)


def bytes_of(
    where: str,
    name: str,
    tensor: torch.Tensor,
    num_bytes: int | None = None,
    *,
    multiple_of: int = 1,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the bytes of `tensor`: primitives that only send tensors allow any dtype."""
    num_elements = None if num_bytes is None else num_bytes // tensor.element_size()
    return bare(where, name, tensor, num_elements, multiple_of=multiple_of, like=like).view(torch.uint8)
