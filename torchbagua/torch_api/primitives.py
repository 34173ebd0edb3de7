"""Bagua's communication primitives, over a torch process group: gloo on CPUs, NCCL on GPUs.

Tensors are contiguous, on one device, and of the same dtype on all ranks. Ranks are numbered as in the communicator. A
rank that is no member of the communicator does nothing.
"""

import io
import pickle
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.collectives.private_groups import all_gather_equal, all_to_all_equal, has_nccl
from torchbagua.torch_api.process_groups import BaguaCommunicator, CommMember, _get_default_group


class ReduceOp(IntEnum):
    """How values are put together. NCCL knows no BOR, BAND and BXOR."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def send(tensor: torch.Tensor, dst: int, comm: object = None) -> None:
    """Send `tensor` to rank `dst`, which calls `recv`; returns when it is sent."""
    if (group := _group_of(comm)) is not None:
        _finish(group.send([_bytes("send", "tensor", tensor)], dst, 0))


def recv(tensor: torch.Tensor, src: int, comm: object = None) -> None:
    """Receive what rank `src` sends, in `tensor`."""
    if (group := _group_of(comm)) is not None:
        _finish(group.recv([_bytes("recv", "tensor", tensor)], src, 0))


def broadcast(tensor: torch.Tensor, src: int = 0, comm: object = None) -> None:
    """Replace `tensor` by that of rank `src`."""
    if (group := _group_of(comm)) is not None:
        _finish(group.broadcast(_bytes("broadcast", "tensor", tensor), src))


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int = 0, comm: object = None) -> None:
    """Replace each tensor by that of rank `src`."""
    for tensor in tensors:
        broadcast(tensor, src, comm)


def broadcast_object(obj: Any, src: int = 0, comm: object = None) -> Any:
    """Return what rank `src` has given as `obj`, pickled on the way: call it between ranks that you trust only."""
    if (group := _group_of(comm)) is None:
        return obj
    device = torch.device("cuda", torch.cuda.current_device()) if has_nccl(group) else torch.device("cpu")
    content = pickle.dumps(obj) if group.rank() == src else b""
    num_bytes = torch.tensor([len(content)], device=device)
    broadcast(num_bytes, src, comm)
    blob = torch.frombuffer(bytearray(content or int(num_bytes)), dtype=torch.uint8).to(device)
    broadcast(blob, src, comm)
    return pickle.load(io.BytesIO(blob.cpu().numpy().tobytes()))


def reduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Put the `send_tensor` of all ranks together in the `recv_tensor` of rank `dst`; the others' stays as it is."""
    if (group := _group_of(comm)) is None:
        return
    total = _bare("reduce", "send_tensor", send_tensor).clone()
    result = _bare("reduce", "recv_tensor", recv_tensor, total.numel())
    reduce_inplace(total, dst, op, comm)
    if group.rank() == dst:
        result.copy_(total)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Do what `reduce` does, in place. On other ranks than `dst`, gloo leaves part of a result in `tensor`."""
    if (group := _group_of(comm)) is None:
        return
    values = _bare("reduce", "tensor", tensor)
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank = _torch_op(op), dst
    _finish(group.reduce([_real("reduce", values, op)], options))
    if group.rank() == dst:
        _divided(values, op, group)


def allreduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Put the `send_tensor` of all ranks together in `recv_tensor`; all ranks get the same bits."""
    if _group_of(comm) is None:
        return
    values = _bare("allreduce", "send_tensor", send_tensor)
    _bare("allreduce", "recv_tensor", recv_tensor, values.numel()).copy_(values)
    allreduce_inplace(recv_tensor, op, comm)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Do what `allreduce` does, in place."""
    if (group := _group_of(comm)) is None:
        return
    values = _bare("allreduce", "tensor", tensor)
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = _torch_op(op), False
    _finish(group.allreduce([_real("allreduce", values, op)], options))
    _divided(values, op, group)


def allreduce_coalesced_inplace(
    tensors: Iterable[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Do what `allreduce_inplace` does with each tensor."""
    for tensor in tensors:
        allreduce_inplace(tensor, op, comm)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object = None) -> None:
    """Receive the `send_tensor` of all ranks in `recv_tensor`, one after the other."""
    if (group := _group_of(comm)) is not None:
        own = _bytes("allgather", "send_tensor", send_tensor)
        all_gather_equal(group, _bytes("allgather", "recv_tensor", recv_tensor, own.numel() * group.size()), own)


def allgather_inplace(tensor: torch.Tensor, comm: object = None) -> None:
    """Do what `allgather` does, in place: part r of `tensor`, of as many as there are ranks, is that of rank r."""
    if (group := _group_of(comm)) is not None:
        values = _bytes("allgather_inplace", "tensor", tensor, multiple_of=group.size())
        all_gather_equal(group, values, values.chunk(group.size())[group.rank()].clone())


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: object = None) -> None:
    """Receive the `send_tensor` of all ranks in the `recv_tensor` of rank `dst`, one after the other."""
    if (group := _group_of(comm)) is None:
        return
    own, parts = _bytes("gather", "send_tensor", send_tensor), []
    if group.rank() == dst:
        result = _bytes("gather", "recv_tensor", recv_tensor, own.numel() * group.size())
        parts = [list(result.chunk(group.size()))]
    options = dist.GatherOptions()
    options.rootRank = dst
    _finish(group.gather(parts, [own], options))


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: object = None) -> None:
    """Do what `gather` does, in place.

    Args:
        tensor: `count` elements; on rank `dst` as many times that as there are ranks, its own being part `dst`.
        count: the elements of each rank.
        dst: the rank that receives.
        comm: the communicator.
    """
    if (group := _group_of(comm)) is not None:
        is_root = group.rank() == dst
        values = _bare("gather_inplace", "tensor", tensor, count * (group.size() if is_root else 1))
        gather(values.chunk(group.size())[dst].clone() if is_root else values, values, dst, comm)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: object = None) -> None:
    """Receive this rank's part of the `send_tensor` of rank `src` in `recv_tensor`."""
    if (group := _group_of(comm)) is None:
        return
    result, parts = _bytes("scatter", "recv_tensor", recv_tensor), []
    if group.rank() == src:
        values = _bytes("scatter", "send_tensor", send_tensor, result.numel() * group.size())
        parts = [list(values.chunk(group.size()))]
    options = dist.ScatterOptions()
    options.rootRank = src
    _finish(group.scatter([result], parts, options))


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: object = None) -> None:
    """Do what `scatter` does, in place.

    Args:
        tensor: receives `count` elements; on rank `src` as many times that as there are ranks, and stays as it is.
        count: the elements of each rank.
        src: the rank that sends.
        comm: the communicator.
    """
    if (group := _group_of(comm)) is not None:
        is_root = group.rank() == src
        values = _bare("scatter_inplace", "tensor", tensor, count * (group.size() if is_root else 1))
        scatter(values, torch.empty_like(values[:count]) if is_root else values, src, comm)


def reduce_scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Put the `send_tensor` of all ranks together, and receive this rank's part in `recv_tensor`."""
    if (group := _group_of(comm)) is None:
        return
    result = _bare("reduce_scatter", "recv_tensor", recv_tensor)
    values = _bare("reduce_scatter", "send_tensor", send_tensor, result.numel() * group.size())
    options = dist.ReduceScatterOptions()
    options.reduceOp = _torch_op(op)
    parts = [_real("reduce_scatter", part, op) for part in values.chunk(group.size())]
    _finish(group.reduce_scatter([_real("reduce_scatter", result, op)], [parts], options))
    _divided(result, op, group)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Do what `reduce_scatter` does, in place: the result is the first part of `tensor`; the rest stays."""
    if (group := _group_of(comm)) is not None:
        values = _bare("reduce_scatter_inplace", "tensor", tensor, multiple_of=group.size())
        reduce_scatter(values.clone(), values.chunk(group.size())[0], op, comm)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object = None) -> None:
    """Send part r of `send_tensor` to each rank r, and receive theirs in `recv_tensor`, one after the other."""
    if (group := _group_of(comm)) is not None:
        values = _bytes("alltoall", "send_tensor", send_tensor, multiple_of=group.size())
        all_to_all_equal(group, _bytes("alltoall", "recv_tensor", recv_tensor, values.numel()), values)


def alltoall_inplace(tensor: torch.Tensor, comm: object = None) -> None:
    """Do what `alltoall` does, in place."""
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
    """Send a part of `send_tensor` to each rank, and receive one of each in `recv_tensor`; parts differ in length.

    Args:
        send_tensor: what is sent.
        send_counts: how many elements go to each rank.
        send_displs: where in `send_tensor` they begin.
        recv_tensor: what is received; elsewhere it stays as it is.
        recv_counts: how many elements come from each rank.
        recv_displs: where in `recv_tensor` they begin.
        comm: the communicator.
    """
    if (group := _group_of(comm)) is None:
        return
    values, result = _bare("alltoall_v", "send_tensor", send_tensor), _bare("alltoall_v", "recv_tensor", recv_tensor)
    sent = torch.cat(_parts("send", values, send_counts, send_displs, group.size()))
    targets = _parts("recv", result, recv_counts, recv_displs, group.size())
    received = result.new_empty(sum(part.numel() for part in targets))
    itemsize = sent.element_size()
    send_splits = [count * itemsize for count in send_counts[: group.size()]]
    recv_splits = [part.nbytes for part in targets]
    options = dist.AllToAllOptions()
    options.asyncOp = False
    _finish(group.alltoall_base(received.view(torch.uint8), sent.view(torch.uint8), recv_splits, send_splits, options))
    for target, part in zip(targets, received.split([part.numel() for part in targets]), strict=True):
        target.copy_(part)


def alltoall_v_inplace(tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: object = None) -> None:
    """Do what `alltoall_v` does, in place: what comes from a rank takes the place of what goes to it."""
    alltoall_v(tensor.clone(), counts, displs, tensor, counts, displs, comm)


def barrier(comm: object = None) -> None:
    """Wait until all ranks have come here."""
    if (group := _group_of(comm)) is not None:
        one = torch.ones(1, device="cuda" if has_nccl(group) else "cpu")
        allreduce_inplace(one, ReduceOp.SUM, comm)
        one.item()  # the host waits for a GPU


def _group_of(comm: object) -> dist.ProcessGroup | None:
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if not isinstance(comm, BaguaCommunicator):
        raise TypeError(
            "torchbagua.torch_api: comm must be what a process group's get_global_communicator returned, or None, got "
            f"{comm!r}"
        )
    return comm.group


def _bare(
    where: str, name: str, tensor: torch.Tensor, num_elements: int | None = None, *, multiple_of: int = 1
) -> torch.Tensor:
    """Return `tensor` as one dimension, outside of autograd."""
    if not tensor.is_contiguous():
        raise ValueError(f"{where}: {name} must be contiguous, got strides {tensor.stride()} of {list(tensor.shape)}")
    if num_elements is not None and tensor.numel() != num_elements:
        raise ValueError(f"{where}: {name} must have {num_elements} elements, got {tensor.numel()}")
    if tensor.numel() % multiple_of:
        raise ValueError(f"{where}: {name} must have a multiple of {multiple_of} elements, got {tensor.numel()}")
    return tensor.detach().view(-1)


def _bytes(
    where: str, name: str, tensor: torch.Tensor, num_bytes: int | None = None, *, multiple_of: int = 1
) -> torch.Tensor:
    """Return the bytes of `tensor`: what only moves may be of any dtype."""
    num_elements = None if num_bytes is None else num_bytes // tensor.element_size()
    return _bare(where, name, tensor, num_elements, multiple_of=multiple_of).view(torch.uint8)


def _real(where: str, values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return what torch's backends can add up: of complex numbers their parts."""
    if not values.is_complex():
        return values
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"{where}: op must be SUM or AVG for complex numbers, got {ReduceOp(op).name}")
    return torch.view_as_real(values)


def _torch_op(op: ReduceOp) -> Any:
    op = ReduceOp(op)
    return getattr(dist.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)  # gloo has no AVG


def _divided(total: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> torch.Tensor:
    if op != ReduceOp.AVG:
        return total
    is_inexact = total.is_floating_point() or total.is_complex()
    return total.div_(group.size()) if is_inexact else total.div_(group.size(), rounding_mode="trunc")


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


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
