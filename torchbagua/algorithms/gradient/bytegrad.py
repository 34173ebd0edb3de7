"""ByteGrad: the mean of gradients in 8 bits."""

from dataclasses import KW_ONLY, dataclass

from torchbagua.algorithms.base import check_flags, register
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedMeanAlgorithm
from torchbagua.codecs.base import DEFAULT_BLOCK
from torchbagua.codecs.block_codec import check_block
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.mean_codecs import MeanCodecs
from torchbagua.codecs.minmax_uint8 import MinMaxUInt8


@dataclass(frozen=True)
class ByteGradAlgorithm(CompressedMeanAlgorithm):
    """Average gradients in 8 bits. The result is bitwise identical on all ranks (Bagua, arXiv 2107.01499).

    It is `CompressedAllReduceAlgorithm` with MinMaxUInt8, and everything in that docstring applies. It computes
    Q(mean_j Q(g_j)). A rank sends about 2 (n-1)/n bytes per element and step, a quarter of what a float32 all-reduce
    sends.

    Args:
        hierarchical, average, error_feedback: see `CompressedAllReduceAlgorithm`. Within nodes, gradients are sent in
            full precision.
        block: the number of elements that share a quantization range, a multiple of 8. A block does not cross a
            parameter's boundary. None gives Bagua's single range per chunk.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK
    error_feedback: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "error_feedback")
        check_block("ByteGradAlgorithm", self.block)

    def make_codecs(self) -> MeanCodecs:
        return MeanCodecs(MinMaxUInt8(self.block), Identity() if self.hierarchical else None)


register("bytegrad", ByteGradAlgorithm, "mean of gradients in 8 bits")
