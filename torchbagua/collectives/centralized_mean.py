"""The mean over all ranks of a group: flat or with respect to nodes, compressed or in full precision."""

from collections.abc import Iterator
from typing import Protocol

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.hierarchical_mean import HierarchicalMean
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.overlapping import OverlappingMean
from torchbagua.collectives.two_phase_mean import TwoPhaseMean
from torchbagua.collectives.value_form import ValueForm
from torchbagua.transport.communicator import Communicator


class Mean(Protocol):
    """Forms the mean (or sum) of a flat tensor over the ranks."""

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` to `out_N`, another tensor like it, and leave `x_N` as it is; by default in place."""
        ...


def centralized_mean(
    group: NodeGroups,
    compressor: Compressor,
    spec: TensorSpec,
    *,
    hierarchical: bool,
    average: bool = True,
    intra_compressor: Compressor | None = None,
    residuals: TwoPhaseResiduals | None = None,
    form: ValueForm | None = None,
) -> Mean:
    """Return the function that averages a flat tensor over `group`; it leaves the same bits on all ranks.

    In full precision and without messages that is the backend's all-reduce, which knows of nodes itself: `hierarchical`
    has no effect there. A group of one changes nothing.

    Args:
        group: who takes part.
        compressor: how what is sent looks; with `hierarchical`, what is sent between nodes. It encodes the tensor's
            dtype.
        spec: the tensor.
        hierarchical: add up within nodes first, where there are several nodes with several ranks.
        average: divide the sum by the number of ranks.
        intra_compressor: with `hierarchical`, how what is sent within nodes looks; None for full precision.
        residuals: of the tensor, float32, which is averaged in place.
        form: in which values of the tensor, float32, are averaged, in place.
    """
    divisor = float(group.size) if average else 1.0
    if group.size == 1:
        return _copy
    intra_compressor = intra_compressor or Identity()
    is_of_nodes = hierarchical and group.intra_node is not None
    is_full = isinstance(compressor, Identity) and (isinstance(intra_compressor, Identity) or not is_of_nodes)
    if is_full and not group.world.posts_messages(spec.device):
        return _in_form(AllReduceMean(group.world, spec, divisor), form)
    mean: Mean
    if is_of_nodes:

        def make_whole() -> Mean:
            hierarchical = Hierarchical(group, spec, compressor.block_elements, intra_compressor)
            return _MeanOverNodes(hierarchical, compressor, residuals, divisor)

        if residuals is None and HierarchicalMean.is_worthwhile(group, compressor, spec, intra_compressor):
            mean = HierarchicalMean(group, compressor, spec, divisor, intra_compressor, make_whole)
        else:
            mean = make_whole()
        mean = _in_form(mean, form)
    elif compressor.wire_is_tensor:  # nothing is encoded on the way
        mean = TwoPhaseMean(group.world, compressor, spec, divisor, residuals=residuals, overlap=group.overlap)
        mean = _in_form(mean, form)
    else:
        mean = TwoPhaseMean(
            group.world, compressor, spec, divisor, residuals=residuals, form=form, overlap=group.overlap
        )
    if residuals is None:
        return mean
    return RedistributingMean(mean, residuals, group.intra_node if is_of_nodes else None, group.world, spec)


def mean_of_nodes(
    group: NodeGroups, compressor: Compressor, spec: TensorSpec, *, residuals: TwoPhaseResiduals | None = None
) -> Mean:
    """Return the function that averages over nodes a flat tensor that all ranks of a node hold alike.

    Each rank sends its shard of it, and what is left out of that goes into its residuals. All ranks of all nodes end
    with the same bits.

    Args:
        group: with several nodes, of which one has several ranks.
        compressor: how what is sent between nodes looks. It encodes the tensor's dtype.
        spec: the tensor.
        residuals: of the tensor, float32, which is averaged in place.
    """
    hierarchical = Hierarchical(group, spec, compressor.block_elements, ranks_agree=True)
    mean = _MeanOverNodes(hierarchical, compressor, residuals)
    return mean if residuals is None else RedistributingMean(mean, residuals, group.intra_node, group.world, spec)


class _MeanOverNodes:
    """The two-phase mean between nodes of their ranks' sums, or of the tensors that the ranks of a node agree on.

    Args:
        hierarchical: gives the sums.
        compressor: the codec between nodes.
        divisor: of the sum; by default the number of nodes.
        residuals: of the tensor.
    """

    def __init__(
        self,
        hierarchical: Hierarchical,
        compressor: Compressor,
        residuals: TwoPhaseResiduals | None,
        divisor: float | None = None,
    ) -> None:
        self._hierarchical = hierarchical
        self._mean: TwoPhaseMean | None = None
        if (owners := hierarchical.owners) is not None:
            spec, start = hierarchical.shard_spec, hierarchical.shard.start
            divisor = divisor or float(owners.size)
            self._mean = TwoPhaseMean(owners, compressor, spec, divisor, residuals=residuals, start=start)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        with self._hierarchical.sum_of_shard(x_N, out_N) as sum_L:
            if self._mean is not None:
                self._mean(sum_L)


def _copy(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
    if out_N is not None:
        out_N.copy_(x_N)


def _in_form(mean: Mean, form: ValueForm | None) -> Mean:
    """Return a mean of values in another form, which they are given by a pass of their own."""
    if form is None:
        return mean

    def change_and_average(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        form.change(x_N)
        mean(x_N, out_N)
        form.change_back(x_N if out_N is None else out_N)

    return change_and_average


class RedistributingMean(OverlappingMean):
    """A mean, before the first of which ranks redistribute the residuals of a bucket that takes the place of others.

    Args:
        mean: what is formed.
        residuals: of the bucket.
        senders: the ranks among which what is sent is divided, those of a node; None where a rank sends all itself.
        owners: the ranks among which the means are divided.
        spec: the bucket's tensor.
    """

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
        """Return whether it begins without a wait: if the mean does, and nothing is to be redistributed."""
        mean = self._mean
        return self._residuals.initial is None and isinstance(mean, OverlappingMean) and mean.may_begin()

    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Form the mean, and yield where that does."""
        if (initial := self._residuals.initial) is not None:
            among = {name: self._owners if name == "mean" else self._senders for name in initial}
            self._residuals.load_whole({name: self._sum_over(among[name], x_N) for name, x_N in initial.items()})
        if isinstance(self._mean, OverlappingMean):
            yield from self._mean.steps(x_N, out_N)
        else:
            self._mean(x_N, out_N)

    def _sum_over(self, communicator: Communicator | None, x_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, of which all but one hold zero: the bits of that one."""
        if communicator is None:
            return x_N
        total_N = x_N.clone()  # `x_N` stays as it is where this fails
        TwoPhaseMean(communicator, Identity(), self._spec, 1.0)(total_N)
        return total_N
