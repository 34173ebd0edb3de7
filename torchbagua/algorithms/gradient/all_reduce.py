"""GradientAllReduce: the mean of gradients in full precision."""

from dataclasses import dataclass

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.runner import Runner


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Average gradients in full precision, as plain DDP does.

    Sums are formed in rank order, over several nodes first within each: in float32, and in float64 for float64
    gradients. An all-reduce of the backend sums in another order, so the result equals plain DDP's bit for bit only
    with two ranks, or if the sums are exact.

    Args:
        hierarchical: with several nodes of several ranks: sum within nodes first, so that each part of a gradient
            crosses between nodes once per node. The result is the mean of all ranks, also if nodes have different
            numbers of ranks. It has no effect in stream order.
        average: divide by the number of ranks; False gives the sum.

    Raises:
        TypeError: an argument is not True or False.
    """

    hierarchical: bool = True
    average: bool = True

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average")

    def prepare(self) -> None:
        """Nothing: full precision needs no native kernel."""

    def make_impl(self, runner: Runner) -> "GradientAllReduceAlgorithmImpl":
        return GradientAllReduceAlgorithmImpl(runner)


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """See `GradientAllReduceAlgorithm`."""

    algorithm: GradientAllReduceAlgorithm

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=self.algorithm.hierarchical, average=self.algorithm.average
        )


register("gradient_allreduce", GradientAllReduceAlgorithm, "mean of gradients in full precision")
