"""The mean over all ranks of a group, or over its nodes: flat or hierarchical, compressed or in full precision."""

from collections.abc import Iterator

import torch

from torchbagua.codecs.base import Compressor, Identity, TensorSpec
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.exchange import Overlap
from torchbagua.collectives.mean import Mean, OverlappingMean, TwoPhaseMean
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.transport.communicator import Communicator


def centralized_mean(
    group: NodeGroups,
    compressor: Compressor,
    spec: TensorSpec,
    *,
    hierarchical: bool,
    average: bool = True,
    intra_compressor: Compressor | None = None,
    residuals: TwoPhaseResiduals | None = None,
    overlap: Overlap | None = None,
) -> Mean:
    """Return the function that averages a flat tensor over `group`. Its result is bitwise equal on all ranks.

    In full precision and without messages, the function is the backend's all-reduce. That takes nodes into account
    already, so `hierarchical` has no effect. In a group of one rank, the mean is the tensor itself.

    One mean may begin while another one with the same `overlap` is in flight.
    """
    if group.size == 1:
        return _copy
    divisor = float(group.size) if average else 1.0
    intra_compressor = intra_compressor or Identity()
    is_of_nodes = hierarchical and group.intra_node is not None
    is_full = isinstance(compressor, Identity) and (isinstance(intra_compressor, Identity) or not is_of_nodes)
    if is_full and not group.world.posts_messages(spec.device):
        return AllReduceMean(group.world, spec, divisor)
    mean: Mean
    if is_of_nodes:
        from torchbagua.collectives.hierarchical import mean_over_nodes

        mean = mean_over_nodes(group, compressor, spec, divisor, intra_compressor, residuals)
    else:
        mean = TwoPhaseMean(group.world, compressor, spec, divisor, residuals=residuals, overlap=overlap)
    if residuals is None:
        return mean
    return RedistributingMean(mean, residuals, group.intra_node if is_of_nodes else None, group.world, spec)


def _copy(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
    if out_N is not None:
        out_N.copy_(x_N)


def mean_of_nodes(
    group: NodeGroups, compressor: Compressor, spec: TensorSpec, *, residuals: TwoPhaseResiduals | None = None
) -> Mean:
    """Return the function that averages a flat tensor over nodes; all ranks of a node have the same tensor.

    Each rank sends its shard of the tensor, and keeps that shard's residual. Results are bitwise equal on all ranks of
    all nodes.
    """
    from torchbagua.collectives.hierarchical import Hierarchical, MeanOverNodes

    hierarchical = Hierarchical(group, spec, compressor.block_elements, ranks_agree=True)
    mean = MeanOverNodes(hierarchical, compressor, residuals)
    return mean if residuals is None else RedistributingMean(mean, residuals, group.intra_node, group.world, spec)


class RedistributingMean(OverlappingMean):
    """A mean that first redistributes the residuals, if its bucket replaces others."""

    def __init__(
        self,
        mean: Mean,
        residuals: TwoPhaseResiduals,
        senders: Communicator | None,
        owners: Communicator,
        spec: TensorSpec,
    ) -> None:
        self._mean = mean
        self._residuals = residuals
        self._senders = senders
        self._owners = owners
        self._spec = spec

    def may_begin(self) -> bool:
        """Return whether it can begin without blocking: the mean can, and no residuals wait for redistribution."""
        mean = self._mean
        return self._residuals.initial is None and isinstance(mean, OverlappingMean) and mean.may_begin()

    def run_overlapping(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean, and yield when the wrapped mean yields."""
        if (initial := self._residuals.initial) is not None:
            among = {name: self._owners if name == "mean" else self._senders for name in initial}
            self._residuals.load_whole({name: self._sum_over(among[name], x_N) for name, x_N in initial.items()})
        if isinstance(self._mean, OverlappingMean):
            yield from self._mean.run_overlapping(x_N, out_N)
        else:
            self._mean(x_N, out_N)

    def _sum_over(self, communicator: Communicator | None, x_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks. All ranks but one have zeros, so the sum is bitwise that rank's values."""
        if communicator is None:
            return x_N
        total_N = x_N.clone()  # a failure leaves `x_N` unchanged
        TwoPhaseMean(communicator, Identity(), self._spec, 1.0)(total_N)
        return total_N
