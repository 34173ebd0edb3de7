"""Replaces FSDP's reduce-scatters of gradients: with the algorithm's codecs, or torch's arithmetic within a timeout."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduce_hook, fsdp_reduce_scatter, fsdp_shards, has_gradient_hooks, premultiplier
from torchbagua._warnings import warn_user
from torchbagua.codecs.base import Identity, MeanCodecs, TensorSpec, sum_dtype
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.row_mean import RowMean
from torchbagua.collectives.torch_reduce_scatter import torch_reduce_scatter
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCollective, FsdpCommRunner
from torchbagua.training.fsdp2.parts import CommunicatingPart
from torchbagua.training.fsdp2.same_rows import SameRows


def install_reduce_scatters(
    undo: ExitStack,
    runner: FsdpCommRunner,
    parts: Sequence[CommunicatingPart],
    codecs: MeanCodecs,
    same_rows: SameRows,
) -> None:
    """Reduce-scatter the gradients of all parts with `codecs` until `undo` is closed, which restores torch's.

    With replicas, a hierarchical mean treats the ranks of one shard group like the ranks of a node, if they are on one
    node. If it does not compress within nodes, torch's reduce-scatter stays.
    """
    has_replicas = runner.replicas is not None and runner.replicas.size > 1
    if has_replicas and codecs.intra_codec is not None and len(runner.group.node_ranks) == 1:
        if isinstance(codecs.intra_codec, Identity):
            return
        codecs = MeanCodecs(codecs.intra_codec)
    for part in parts:
        _replace_reduce_scatter(undo, part, RowScatter(runner, part, codecs, same_rows))


def bound_reduce_scatters(
    undo: ExitStack,
    group: BaguaProcessGroup,
    failure: FirstFailure,
    parts: Sequence[CommunicatingPart],
    same_rows: SameRows,
) -> None:
    """Reduce-scatter the gradients of `parts` over the connections of `group`, until `undo` is closed.

    A reduce-scatter that the user has set stays. Torch's reduce-scatter stays too, with a warning, if the transport of
    `group` has no torch group.
    """
    torchs = [part for part in parts if fsdp_reduce_scatter(part.param_group)[1]]
    if torchs and not group.world.has_torch_group:
        warn_user(
            f"torchbagua: FSDP itself reduce-scatters gradients, since the transport of the {group.world.scope} group "
            f"has no torch group: timeout={group.timeout} does not bound these waits, but the timeout of "
            "init_process_group does. Pass this timeout to init_process_group"
        )
        return
    for part in torchs:
        _replace_reduce_scatter(undo, part, BoundedReduceScatter(group, failure, part, same_rows))


def _replace_reduce_scatter(undo: ExitStack, part: CommunicatingPart, scatter: FsdpCollective) -> None:
    undo.callback(part.part.set_custom_reduce_scatter, fsdp_reduce_scatter(part.param_group)[0])
    part.part.set_custom_reduce_scatter(scatter)


class RowScatter(FsdpCollective):
    """The reduce-scatter of one FSDP parameter group, with the algorithm's codecs."""

    def __init__(
        self, runner: FsdpCommRunner, part: CommunicatingPart, codecs: MeanCodecs, same_rows: SameRows
    ) -> None:
        self._runner = runner
        self._part = part
        self._same_rows = same_rows
        self._mean_of = cache(partial(_row_mean, runner.group, codecs))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean over the ranks of this rank's row of `input_tensor` to `output_tensor`, in backward.

        In stream order everything is launched on the current stream. Otherwise it returns when the row has been
        reduced; on CPUs it returns at once if the row is read only after backward.
        """
        row = self._part.row(output_tensor.numel())
        mean = self._mean_of(row.spec(input_tensor, self._part.name), self._divisor(op))
        dtype = sum_dtype(output_tensor.dtype)

        def scatter(x_N: torch.Tensor, out_L: torch.Tensor) -> None:
            sums_L = out_L if out_L.dtype == dtype else torch.empty_like(out_L, dtype=dtype)
            mean(x_N, sums_L)
            if sums_L is not out_L:
                out_L.copy_(sums_L)

        reduce = partial(self._same_rows.reduce, self._part, row, scatter, input_tensor, output_tensor)
        until_end = self._is_read_at_end(output_tensor, op)
        self._runner.run(self._runner.group, self._part.name, input_tensor, reduce, until_end=until_end)

    def _is_read_at_end(self, out_L: torch.Tensor, op: Any) -> bool:
        """Return whether FSDP reads the local row only after backward, when it creates views of it as gradients.

        In all other cases FSDP divides or casts the row, adds it to gradients, or passes it to a hook, or a parameter's
        hook may read it.
        """
        if not out_L.is_cpu or op == dist.ReduceOp.SUM or fsdp_all_reduce_hook(self._part.param_group) is not None:
            return False
        return all(
            parameter.dtype == out_L.dtype and parameter.grad is None and not has_gradient_hooks(parameter)
            for parameter, _ in fsdp_shards(self._part.param_group)
        )

    def _divisor(self, op: Any) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return float(self._runner.group.size)
        if (factor := premultiplier(op)) is not None:
            return 1.0 / factor
        raise ValueError(f"torchbagua: FSDP's reduce-scatter must be AVG, SUM or PREMUL_SUM, got {op}")


def _row_mean(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, divisor: float) -> RowMean:
    codecs = codecs.for_dtype(row.dtype)
    return RowMean(group, codecs.codec, row, divisor=divisor, intra_compressor=codecs.intra_codec)


class BoundedReduceScatter(FsdpCollective):
    """The reduce-scatter of one FSDP parameter group: torch's arithmetic over torchbagua's connections."""

    def __init__(
        self, group: BaguaProcessGroup, failure: FirstFailure, part: CommunicatingPart, same_rows: SameRows
    ) -> None:
        self._communicator = group.world
        self._failure = failure
        self._part = part
        self._same_rows = same_rows

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean over the ranks of this rank's row of `input_tensor` to `output_tensor`; FSDP blocks."""
        row = self._part.row(output_tensor.numel())
        scatter = partial(torch_reduce_scatter, self._communicator, op=op, name=self._part.name)
        with self._failure.guard():
            self._same_rows.reduce(self._part, row, scatter, input_tensor, output_tensor)
