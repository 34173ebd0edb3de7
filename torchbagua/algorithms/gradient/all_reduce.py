"""GradientAllReduce: the mean of gradients in full precision."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.runner import Runner


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Average gradients in full precision, as plain DDP does.

    By default the backend's own all-reduce forms the mean, over private connections. Its bits are those of torch's
    `allreduce_hook` and, if the number of ranks is a power of two, of plain DDP.

    Args:
        hierarchical: with several nodes of several ranks: sum within nodes first, so that each part of a gradient
            crosses between nodes once per node. The result is the mean of all ranks, also if nodes have different
            numbers of ranks. It implies `in_rank_order=True`.
        average: divide by the number of ranks; False gives the sum.
        in_rank_order: sum in rank order, or with `hierarchical` in node order, in float32, or in float64 for float64
            gradients, and round once. The result then does not depend on the backend. A state loads with the same
            value only.

    In stream order the backend sums, whatever `hierarchical` and `in_rank_order` are.

    Raises:
        TypeError: an argument is not True or False.
    """

    hierarchical: bool = False
    average: bool = True
    _: KW_ONLY
    in_rank_order: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "in_rank_order")
        if self.hierarchical:
            object.__setattr__(self, "in_rank_order", True)

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return what decides on the order of summation: in another one a resumed run gets other bits."""
        is_by_nodes = self.hierarchical and process_group.intra_node is not None
        return {"in_rank_order": self.in_rank_order, "hierarchical": is_by_nodes}

    def prepare(self) -> None:
        """Nothing: full precision needs no native kernel."""

    def make_impl(self, runner: Runner) -> "GradientAllReduceAlgorithmImpl":
        return GradientAllReduceAlgorithmImpl(runner)


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """See `GradientAllReduceAlgorithm`."""

    algorithm: GradientAllReduceAlgorithm

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        algorithm = self.algorithm
        if algorithm.in_rank_order:
            bucket.append_centralized_synchronous_op(algorithm.hierarchical, algorithm.average)
        else:
            bucket.append_all_reduce_op(algorithm.average)


register("gradient_allreduce", GradientAllReduceAlgorithm, "mean of gradients in full precision")
