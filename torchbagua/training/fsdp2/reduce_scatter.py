"""What attach does to the parts of a sharded module: their gradients are reduce-scattered in a codec's bytes."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduce_hook, fsdp_reduce_scatter, fsdp_shards, has_gradient_hooks, premultiplier
from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.cast import Identity
from torchbagua.collectives.row_mean import RowMean
from torchbagua.training.fsdp2.rows import CommunicatingPart, Row, RowRunner, spec_of_row


def scattered_by(runner: RowRunner, parts: Sequence[CommunicatingPart]) -> ExitStack:
    """Have the impl reduce-scatter the gradients of all parts until what is returned is closed; then torch does again.

    With replicas, a hierarchical algorithm treats the ranks of one shard group as it treats those of one node, if they
    are on one node. Where it compresses nothing within nodes, torch's own reduce-scatter stays.

    Raises:
        ValueError: it respects nodes, and these have different numbers of ranks.
    """
    impl, algorithm = runner.impl, runner.impl.algorithm
    node_ranks = impl.process_group.node_ranks
    if algorithm.hierarchical and len(set(map(len, node_ranks))) > 1:
        raise ValueError(
            f"attach: {type(algorithm).__name__}: hierarchical must be False for sharded modules where nodes have "
            f"different numbers of ranks, got {node_ranks}"
        )
    compressor, intra = algorithm.make_compressors()
    has_replicas = runner.replicas is not None and runner.replicas.size > 1
    if has_replicas and algorithm.hierarchical and len(node_ranks) == 1:
        compressor = intra
        if isinstance(intra, Identity):
            return ExitStack()
    with ExitStack() as undo:  # closed here only where one of these steps raises
        for one in parts:
            undo.callback(one.part.set_custom_reduce_scatter, fsdp_reduce_scatter(one.param_group)[0])
            own = RowScatter(runner, one, compressor, intra if algorithm.hierarchical else None)
            one.part.set_custom_reduce_scatter(own)
        return undo.pop_all()


class RowScatter:
    """The reduce-scatter of one FSDP parameter group: a `torch.distributed.fsdp` ReduceScatter, by its interface.

    Args:
        runner: whose impl's group is used.
        part: whose gradients they are.
        compressor: how values look that travel between all ranks, or between nodes.
        intra_compressor: how they look within nodes; None to leave nodes out of account.
    """

    def __init__(
        self, runner: RowRunner, part: CommunicatingPart, compressor: Compressor, intra_compressor: Compressor | None
    ) -> None:
        self._runner = runner
        self._group = runner.impl.process_group
        self._part = part
        self._compressor = compressor
        self._intra_compressor = intra_compressor
        self._means: dict[tuple[Row, torch.dtype, torch.device, float], RowMean] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output, on the current stream."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean of own row of all ranks' `input_tensor` to `output_tensor`; FSDP calls it in backward.

        On CPUs, and over gloo, it returns when that is there; on CPUs at once if it is read after backward only. Over
        NCCL everything is launched on the current stream.

        Raises:
            ValueError: `op` is none that FSDP uses.
            CommunicationError: a rank is gone or did not take part in time.
        """
        self._runner.impl.use_device(input_tensor.device)
        mean = self._mean(self._part.row(output_tensor.numel()), input_tensor, self._divisor(op))
        dtype = sum_dtype(output_tensor.dtype)

        def scatter() -> None:
            out_L = output_tensor
            sums_L = out_L if out_L.dtype == dtype else torch.empty_like(out_L, dtype=dtype)
            mean(input_tensor, sums_L)
            if sums_L is not out_L:
                out_L.copy_(sums_L)

        until_end = self._is_read_at_end(output_tensor, op)
        self._runner.run(self._group, self._part.name, input_tensor, scatter, until_end=until_end)

    def _is_read_at_end(self, out_L: torch.Tensor, op: Any) -> bool:
        """Whether nobody reads own row before backward ends: FSDP then makes views of it, which become the gradients.

        Else it divides or casts it, adds it to gradients, hands it to a hook, or a hook of a parameter may read it.
        """
        if out_L.is_cuda or op == dist.ReduceOp.SUM or fsdp_all_reduce_hook(self._part.param_group) is not None:
            return False
        return all(
            one.dtype == out_L.dtype and one.grad is None and not has_gradient_hooks(one)
            for one, _ in fsdp_shards(self._part.param_group)
        )

    def _divisor(self, op: Any) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return float(self._group.size)
        if (factor := premultiplier(op)) is not None:
            return 1.0 / factor
        raise ValueError(f"torchbagua: FSDP's reduce-scatter must be AVG, SUM or PREMUL_SUM, got {op}")

    def _mean(self, row: Row, x_N: torch.Tensor, divisor: float) -> RowMean:
        """Return what forms the mean; made anew where a row is another than before."""
        key = (row, x_N.dtype, x_N.device, divisor)
        if key not in self._means:
            compressor, intra = self._compressor, self._intra_compressor
            if intra is not None and not intra.encodes(x_N.dtype):
                intra = Identity()
            self._means[key] = RowMean(
                self._group,
                compressor if compressor.encodes(x_N.dtype) else Identity(),
                spec_of_row(row, x_N, self._part.name),
                divisor=divisor,
                intra_compressor=intra,
            )
        return self._means[key]
