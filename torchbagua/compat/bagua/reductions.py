"""Bagua's primitives that reduce the values of all ranks; see primitives.py."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.compat.bagua._torch import has_nccl
from torchbagua.compat.bagua.arguments import bare, group_of


class ReduceOp(IntEnum):
    """The reduction operation. NCCL does not support BOR, BAND and BXOR."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def reduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Reduce the `send_tensor` of all ranks into the `recv_tensor` of rank `dst`; on other ranks it does not change."""
    if (group := group_of(comm)) is None:
        return
    total = bare("reduce", "send_tensor", send_tensor).clone()
    result = bare("reduce", "recv_tensor", recv_tensor, total.numel(), like=send_tensor)
    reduce_inplace(total, dst, op, comm)
    if group.rank() == dst:
        result.copy_(total)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Run `reduce` in place. On ranks other than `dst`, gloo leaves a partial result in `tensor`."""
    if (group := group_of(comm)) is None:
        return
    values = bare("reduce", "tensor", tensor)
    dist.reduce(_real("reduce", values, op), op=_torch_op(op), group=group, group_dst=dst)
    if group.rank() == dst:
        _divide(values, op, group)


def allreduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Reduce the `send_tensor` of all ranks into `recv_tensor`; results are bitwise equal on all ranks."""
    if group_of(comm) is None:
        return
    values = bare("allreduce", "send_tensor", send_tensor)
    bare("allreduce", "recv_tensor", recv_tensor, values.numel(), like=send_tensor).copy_(values)
    allreduce_inplace(recv_tensor, op, comm)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Run `allreduce` in place."""
    if (group := group_of(comm)) is None:
        return
    values = bare("allreduce", "tensor", tensor)
    dist.all_reduce(_real("allreduce", values, op), _torch_op(op), group)
    _divide(values, op, group)


def allreduce_coalesced_inplace(
    tensors: Iterable[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Call `allreduce_inplace` on each tensor."""
    for tensor in tensors:
        allreduce_inplace(tensor, op, comm)


def reduce_scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None
) -> None:
    """Reduce the `send_tensor` of all ranks, and receive this rank's part into `recv_tensor`."""
    if (group := group_of(comm)) is None:
        return
    result = bare("reduce_scatter", "recv_tensor", recv_tensor)
    values = bare("reduce_scatter", "send_tensor", send_tensor, result.numel() * group.size(), like=recv_tensor)
    parts = [_real("reduce_scatter", part, op) for part in values.chunk(group.size())]
    dist.reduce_scatter(_real("reduce_scatter", result, op), parts, _torch_op(op), group)
    _divide(result, op, group)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object = None) -> None:
    """Run `reduce_scatter` in place: the result is the first part of `tensor`; the other parts do not change."""
    if (group := group_of(comm)) is not None:
        values = bare("reduce_scatter_inplace", "tensor", tensor, multiple_of=group.size())
        reduce_scatter(values.clone(), values.chunk(group.size())[0], op, comm)


def barrier(comm: object = None) -> None:
    """Wait until all ranks have called this function."""
    if (group := group_of(comm)) is not None:
        token = torch.ones(1, device="cuda" if has_nccl(group) else "cpu")
        allreduce_inplace(token, ReduceOp.SUM, comm)
        token.item()  # the host waits for the GPU


def _real(where: str, values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return values that torch's backends can reduce: complex numbers as real and imaginary parts."""
    if not values.is_complex():
        return values
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"{where}: op must be SUM or AVG for complex numbers, got {ReduceOp(op).name}")
    return torch.view_as_real(values)


def _torch_op(op: ReduceOp) -> Any:
    op = ReduceOp(op)
    return getattr(dist.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)  # gloo has no AVG


def _divide(total: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
    if op == ReduceOp.AVG:
        is_inexact = total.is_floating_point() or total.is_complex()
        total.div_(group.size(), rounding_mode=None if is_inexact else "trunc")
