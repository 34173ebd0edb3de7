"""GradientAllReduce: the mean of gradients in full precision.

On each of n ranks, in synchronous SGD (Bagua, arXiv 2107.01499, primitive C_FP_S):

    g_i = gradient of f_i(x)                                    # backward, on rank i
    for each bucket that backward has filled:
        g = (g_1 + ... + g_n) / n                               # on the lane, while backward continues
    x = x - gamma * g                                           # the attached optimizer
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.runner import AlgorithmImpl


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Average gradients in full precision, as plain DDP does.

    By default, the backend's all-reduce forms the mean, over private connections. The result is bitwise equal to that
    of torch's `allreduce_hook` and, if the number of ranks is a power of two, to that of plain DDP.

    Args:
        hierarchical: with multi-node groups that have several ranks per node, sum within nodes first, so that each part
            of a gradient crosses between nodes once per node. The result is the mean of all ranks, even if nodes have
            different numbers of ranks. It implies `in_rank_order=True`.
        average: divide by the number of ranks. False gives the sum.
        in_rank_order: sum in rank order (with `hierarchical`, in node order), in float32, or in float64 for float64
            gradients, and round once. The result then does not depend on the backend. A state can be loaded only with
            the same value.

    In stream order, the backend always sums, regardless of `hierarchical` and `in_rank_order`.

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
        """Return what determines the order of summation. With another order, a resumed run is not bitwise equal."""
        is_by_nodes = self.hierarchical and process_group.intra_node is not None
        return {"in_rank_order": self.in_rank_order, "hierarchical": is_by_nodes}

    def prepare(self) -> None:
        """Do nothing: full precision needs no native kernels."""

    def make_impl(self, runner: GradientRunner) -> "GradientAllReduceAlgorithmImpl":
        return GradientAllReduceAlgorithmImpl(runner)


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """See `GradientAllReduceAlgorithm`."""

    algorithm: GradientAllReduceAlgorithm
    runner: GradientRunner

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        algorithm = self.algorithm
        if algorithm.in_rank_order:
            bucket.append_centralized_synchronous_op(algorithm.hierarchical, algorithm.average)
        else:
            bucket.append_all_reduce_op(algorithm.average)


register("gradient_allreduce", GradientAllReduceAlgorithm, "mean of gradients in full precision")
