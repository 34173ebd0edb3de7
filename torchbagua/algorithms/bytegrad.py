"""ByteGrad: gradients averaged in eight bits."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.compressors import DEFAULT_BLOCK, MinMaxUInt8, check_block


@dataclass(frozen=True)
class ByteGradAlgorithm(Algorithm):
    """Average gradients in 8 bits: Q(mean_j Q(g_j)), bit-identical on all ranks (Bagua, arXiv 2107.01499).

    A rank sends about 2 (n-1)/n bytes an element and step, a quarter of what a float32 all-reduce sends. complex64 is
    coded as pairs of float32; float64 and complex128 travel in full precision.

    Args:
        hierarchical: where there are several nodes with several ranks, full precision within nodes and 8 bits between.
        average: divide by the number of ranks; False gives the sum.
        block: elements that share a quantisation range, a multiple of 8, never across a parameter's boundary; None
            gives Bagua's one range per chunk.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    averages_weights: ClassVar[bool | None] = False

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average")
        check_block("ByteGradAlgorithm", self.block)

    def make_impl(self, process_group: BaguaProcessGroup) -> "ByteGradAlgorithmImpl":
        """Return the impl over `process_group`."""
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average, block=self.block)


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """See `ByteGradAlgorithm`."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        average: bool = True,
        *,
        block: int | None = DEFAULT_BLOCK,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average
        self.compressor = MinMaxUInt8(block)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the compressed mean of the bucket."""
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression=self.codec_for(bucket),
        )


register("bytegrad", ByteGradAlgorithm, "mean of gradients in 8 bits")
