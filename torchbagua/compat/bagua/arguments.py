"""What the primitives are given: communicators and tensors, checked."""

import torch
import torch.distributed as dist

from torchbagua.compat.bagua.process_groups import BaguaCommunicator, CommMember, _get_default_group


def group_of(comm: object) -> dist.ProcessGroup | None:
    """Return torch's group of a communicator, by default the world's; None where this rank is no member."""
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if not isinstance(comm, BaguaCommunicator):
        raise TypeError(
            "torchbagua.compat.bagua: comm must be what a process group's get_global_communicator returned, or None, "
            f"got {comm!r}"
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
    """Return `tensor`, of the dtype of `like`, as one dimension outside of autograd."""
    if like is not None and tensor.dtype != like.dtype:
        raise TypeError(f"{where}: {name} must be of {like.dtype}, as the other tensor is, got {tensor.dtype}")
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
    """Return the bytes of `tensor`: what only moves may be of any dtype."""
    num_elements = None if num_bytes is None else num_bytes // tensor.element_size()
    return bare(where, name, tensor, num_elements, multiple_of=multiple_of, like=like).view(torch.uint8)
