"""Bagua's primitives that send tensors over a torch process group: gloo on CPUs, NCCL on GPUs.

Tensors must be contiguous, on one device, and of the same dtype on all ranks. Ranks are numbered as in the
communicator. A rank that is not a member of the communicator does nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.compat.bagua.arguments import bare, bytes_of, group_of


def send(tensor: torch.Tensor, dst: int, comm: object = None) -> None:
    """Send `tensor` to rank `dst`, which calls `recv`; return when the tensor is sent."""
    if (group := group_of(comm)) is not None:
        dist.send(bytes_of("send", "tensor", tensor), group=group, group_dst=dst)


def recv(tensor: torch.Tensor, src: int, comm: object = None) -> None:
    """Receive the tensor that rank `src` sends into `tensor`."""
    if (group := group_of(comm)) is not None:
        # torch.distributed.recv does not accept a directly constructed group (torch 2.13).
        group.recv([bytes_of("recv", "tensor", tensor)], src, 0).wait()


def broadcast(tensor: torch.Tensor, src: int = 0, comm: object = None) -> None:
    """Replace `tensor` with the tensor of rank `src`."""
    if (group := group_of(comm)) is not None:
        dist.broadcast(bytes_of("broadcast", "tensor", tensor), group=group, group_src=src)


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int = 0, comm: object = None) -> None:
    """Replace each tensor with the tensor of rank `src`."""
    for tensor in tensors:
        broadcast(tensor, src, comm)


def broadcast_object(obj: Any, src: int = 0, comm: object = None) -> Any:
    """Return `obj` of rank `src`. Objects are pickled, so call it only between ranks that you trust."""
    objects = [obj]
    if (group := group_of(comm)) is not None:
        dist.broadcast_object_list(objects, group=group, group_src=src)
    return objects[0]


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object = None) -> None:
    """Receive the `send_tensor` of all ranks into `recv_tensor`, one after the other."""
    if (group := group_of(comm)) is not None:
        own = bytes_of("allgather", "send_tensor", send_tensor)
        num_bytes = own.numel() * group.size()
        result = bytes_of("allgather", "recv_tensor", recv_tensor, num_bytes, like=send_tensor)
        dist.all_gather(list(result.tensor_split(group.size())), own, group)


def allgather_inplace(tensor: torch.Tensor, comm: object = None) -> None:
    """Run `allgather` in place: `tensor` has one part per rank, and part r belongs to rank r."""
    if (group := group_of(comm)) is not None:
        values = bytes_of("allgather_inplace", "tensor", tensor, multiple_of=group.size())
        parts = list(values.tensor_split(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group)


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: object = None) -> None:
    """Receive the `send_tensor` of all ranks into the `recv_tensor` of rank `dst`, one after the other."""
    if (group := group_of(comm)) is None:
        return
    own, parts = bytes_of("gather", "send_tensor", send_tensor), None
    if group.rank() == dst:
        result = bytes_of("gather", "recv_tensor", recv_tensor, own.numel() * group.size(), like=send_tensor)
        parts = list(result.chunk(group.size()))
    dist.gather(own, parts, group=group, group_dst=dst)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: object = None) -> None:
    """Run `gather` in place.

    Args:
        tensor: `count` elements; on rank `dst`, `count` elements per rank, with its local values in part `dst`.
        count: the number of elements of each rank.
        dst: the rank that receives.
        comm: the communicator.
    """
    if (group := group_of(comm)) is not None:
        is_root = group.rank() == dst
        values = bare("gather_inplace", "tensor", tensor, count * (group.size() if is_root else 1))
        gather(values.chunk(group.size())[dst].clone() if is_root else values, values, dst, comm)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: object = None) -> None:
    """Receive this rank's part of the `send_tensor` of rank `src` into `recv_tensor`."""
    if (group := group_of(comm)) is None:
        return
    result, parts = bytes_of("scatter", "recv_tensor", recv_tensor), None
    if group.rank() == src:
        values = bytes_of("scatter", "send_tensor", send_tensor, result.numel() * group.size(), like=recv_tensor)
        parts = list(values.chunk(group.size()))
    dist.scatter(result, parts, group=group, group_src=src)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: object = None) -> None:
    """Run `scatter` in place.

    Args:
        tensor: receives `count` elements; on rank `src`, `count` elements per rank, which do not change.
        count: the number of elements of each rank.
        src: the rank that sends.
        comm: the communicator.
    """
    if (group := group_of(comm)) is not None:
        is_root = group.rank() == src
        values = bare("scatter_inplace", "tensor", tensor, count * (group.size() if is_root else 1))
        scatter(values, torch.empty_like(values[:count]) if is_root else values, src, comm)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object = None) -> None:
    """Send part r of `send_tensor` to each rank r, and receive their parts into `recv_tensor`, one after the other."""
    if (group := group_of(comm)) is not None:
        values = bytes_of("alltoall", "send_tensor", send_tensor, multiple_of=group.size())
        result = bytes_of("alltoall", "recv_tensor", recv_tensor, values.numel(), like=send_tensor)
        dist.all_to_all_single(result, values, group=group)


def alltoall_inplace(tensor: torch.Tensor, comm: object = None) -> None:
    """Run `alltoall` in place."""
    alltoall(tensor.clone(), tensor, comm)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: object = None,
) -> None:
    """Send a part of `send_tensor` to each rank, and receive a part from each into `recv_tensor`; lengths may differ.

    Args:
        send_tensor: the tensor to send.
        send_counts: the number of elements to send to each rank.
        send_displs: their offsets in `send_tensor`.
        recv_tensor: the tensor to receive into; its other elements do not change.
        recv_counts: the number of elements to receive from each rank.
        recv_displs: their offsets in `recv_tensor`.
        comm: the communicator.
    """
    if (group := group_of(comm)) is None:
        return
    values = bare("alltoall_v", "send_tensor", send_tensor)
    result = bare("alltoall_v", "recv_tensor", recv_tensor, like=send_tensor)
    sent = torch.cat(_parts("send", values, send_counts, send_displs, group.size()))
    targets = _parts("recv", result, recv_counts, recv_displs, group.size())
    received = result.new_empty(sum(part.numel() for part in targets))
    itemsize = sent.element_size()
    send_splits = [count * itemsize for count in send_counts[: group.size()]]
    recv_splits = [part.nbytes for part in targets]
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), recv_splits, send_splits, group=group)
    for target, part in zip(targets, received.split([part.numel() for part in targets]), strict=True):
        target.copy_(part)


def alltoall_v_inplace(tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: object = None) -> None:
    """Run `alltoall_v` in place: the elements received from a rank replace the elements sent to it."""
    alltoall_v(tensor.clone(), counts, displs, tensor, counts, displs, comm)


def _parts(
    which: str, values: torch.Tensor, counts: Sequence[int], displs: Sequence[int], size: int
) -> list[torch.Tensor]:
    if len(counts) < size or len(displs) < size:
        raise ValueError(
            f"alltoall_v: {which}_counts and {which}_displs must have {size} numbers, got {len(counts)} and "
            f"{len(displs)}"
        )
    spans = list(zip(displs[:size], counts[:size], strict=True))
    if any(start < 0 or count < 0 or start + count > values.numel() for start, count in spans):
        raise ValueError(
            f"alltoall_v: {which}_displs + {which}_counts must be within {values.numel()} elements, got {spans}"
        )
    return [values[start : start + count] for start, count in spans]
