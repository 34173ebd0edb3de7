"""Installs the communication of a sharded module: of its gradients, over replicas too, and of gathered weights."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduce_hook, fsdp_reduce_scatter, fsdp_shards, has_gradient_hooks, premultiplier
from torchbagua.codecs.base import Identity, MeanCodecs, TensorSpec, by_name, sum_dtype
from torchbagua.collectives.agreement import stable_repr
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.row_mean import RowMean
from torchbagua.runtime.runner import Runner
from torchbagua.training.fsdp2.bounded import bound_gathers, bound_reduce_scatters, on_cpus, open_shards
from torchbagua.training.fsdp2.checks import check_even_nodes, shard_codecs
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.training.fsdp2.gather import install_weight_gathers
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.replicas import install_replica_means, open_replicas, share_shards
from torchbagua.training.fsdp2.rows import CommunicatingPart, communicating_parts
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
        undo.callback(part.part.set_custom_reduce_scatter, fsdp_reduce_scatter(part.param_group)[0])
        part.part.set_custom_reduce_scatter(RowScatter(runner, part, codecs, same_rows))


class RowScatter:
    """The reduce-scatter of one FSDP parameter group; implements `torch.distributed.fsdp`'s ReduceScatter interface."""

    def __init__(
        self, runner: FsdpCommRunner, part: CommunicatingPart, codecs: MeanCodecs, same_rows: SameRows
    ) -> None:
        self._runner = runner
        self._part = part
        self._same_rows = same_rows
        self._mean_of = cache(partial(_row_mean, runner.group, codecs))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output, on the current stream."""
        return torch.empty(*size, dtype=dtype, device=device)

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

        def scatter() -> None:
            out_L = output_tensor
            sums_L = out_L if out_L.dtype == dtype else torch.empty_like(out_L, dtype=dtype)
            mean(input_tensor, sums_L)
            if sums_L is not out_L:
                out_L.copy_(sums_L)

        zeros = partial(
            _reduce_zeros, mean, row.num_elements, self._runner.group.size, input_tensor.dtype, input_tensor.device
        )
        reduce = partial(self._same_rows.reduce, self._part, row, scatter, zeros)
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


def _reduce_zeros(mean: RowMean, length: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    zeros = torch.zeros(num_rows * length, dtype=dtype, device=device)
    mean(zeros, torch.empty(length, dtype=sum_dtype(dtype), device=device))


def _row_mean(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, divisor: float) -> RowMean:
    codecs = codecs.for_dtype(row.dtype)
    return RowMean(group, codecs.codec, row, divisor=divisor, intra_compressor=codecs.intra_codec)


def install_communication(
    undo: ExitStack,
    runner: Runner,
    module: torch.nn.Module,
    parts: Mapping[str, Any],
    given: Sharding | None,
    rank_invariants: Mapping[str, Any],
) -> None:
    """Have `runner` communicate for a module until `undo` is closed. Collective.

    All replicas first get the parameters and buffers of the first replica.
    """
    sharding = given or Sharding()
    codecs = shard_codecs("attach", runner.algorithm)
    communicating = communicating_parts(module, parts)
    for part in communicating:
        runner.use_device(part.param_group.device)
        undo.enter_context(part.watch_gradients())
    fsdp_runner = FsdpCommRunner(runner)
    if sharding.replicate_group is not None:
        algorithm = stable_repr(runner.algorithm, type(runner.algorithm).__name__)
        rank_invariants = {"the algorithm": algorithm, **rank_invariants}
        replicas = undo.enter_context(open_replicas(runner, sharding.replicate_group, rank_invariants))
        share_shards(replicas, module)
        fsdp_runner = FsdpCommRunner(runner, replicas)
        install_replica_means(undo, fsdp_runner, communicating, codecs)
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus)
    check_even_nodes(runner.algorithm, codecs, fsdp_runner.group.node_ranks)
    same_rows = fsdp_runner.compare_rows(communicating)
    install_reduce_scatters(undo, fsdp_runner, communicating, codecs, same_rows)
    bound_reduce_scatters(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus, same_rows)
    if sharding.quantize_weights is not None:
        codec = by_name(sharding.quantize_weights)
        install_weight_gathers(undo, fsdp_runner, communicating, codec, hierarchical=codecs.hierarchical)


def bound_waits(undo: ExitStack, runner: Runner, module: torch.nn.Module, parts: Mapping[str, Any]) -> None:
    """Bound FSDP's waits by the timeout of `runner`, of a weight algorithm, until `undo` is closed.

    Collective among the ranks that share a copy of the module.
    """
    communicating = communicating_parts(module, parts)
    shards = undo.enter_context(open_shards(runner, communicating))  # on GPUs too: a rank may have refused to attach
    failure = FirstFailure([shards, runner.process_group])
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, shards, failure, between_cpus)
    for part in between_cpus:
        undo.enter_context(part.watch_gradients())
    if between_cpus:
        bound_reduce_scatters(undo, shards, failure, between_cpus, SameRows(shards.world, communicating))
