"""TopK: gradients averaged by the largest elements of each block."""

from dataclasses import KW_ONLY, dataclass

from torchbagua.algorithms.base import check_flags, register
from torchbagua.algorithms.compressed_allreduce import CompressedAllReduceAlgorithmImpl, CompressedMeanAlgorithm
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.compressors import DEFAULT_BLOCK, Compressor, Identity, TopK
from torchbagua.compressors.topk import check_ratio, check_sparse_block


@dataclass(frozen=True)
class TopKAlgorithm(CompressedMeanAlgorithm):
    """Average gradients by the largest elements of each block, with error feedback, for SGD.

    It is `CompressedAllReduceAlgorithm` with `TopK` and error feedback, and all that is said there is true of it. Of
    the gradient, and of the mean, only the share `ratio` is sent. The rest is added to what is sent next (Aji and
    Heafield, arXiv 1704.05021). A rank sends about 2 (n-1)/n of `ratio * 2.6` bytes an element and step: at 0.01 150
    times less than what a float32 all-reduce sends. The result is bit-identical on all ranks.

    Most elements of what an optimizer then gets are zero in any one step, and stand for many steps in another. Adam,
    which divides by the size of what it gets, trains badly with that.

    Args:
        ratio: the share of elements that is sent, above 0 and at most 1.
        hierarchical: with several nodes of several ranks: full precision within nodes, the largest between them.
        average: divide by the number of ranks; False gives the sum.
        block: how many elements the largest are taken of, a multiple of 8 from 8 to 4096. A block does not cross a
            parameter's boundary, and at least one element of each is sent.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    ratio: float = 0.01
    _: KW_ONLY
    hierarchical: bool = True
    average: bool = True
    block: int = DEFAULT_BLOCK

    error_feedback = True  # and no argument: nearly everything is left out

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average")
        check_ratio("TopKAlgorithm", self.ratio)
        check_sparse_block("TopKAlgorithm", self.block)

    def make_compressors(self) -> tuple[Compressor, Compressor]:
        return TopK(self.block, self.ratio), Identity()

    def make_impl(self, process_group: BaguaProcessGroup) -> "TopKAlgorithmImpl":
        return TopKAlgorithmImpl(process_group, self)


class TopKAlgorithmImpl(CompressedAllReduceAlgorithmImpl):
    """See `TopKAlgorithm`."""


register("topk", TopKAlgorithm, "mean of the largest elements of gradients, for SGD")
