"""The codecs of a mean, and full precision in place of those that do not encode a dtype."""

from dataclasses import dataclass

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity


@dataclass(frozen=True)
class MeanCodecs:
    """The codecs with which ranks send what they average.

    Args:
        codec: the codec between all ranks; with an `intra_codec`, between nodes.
        intra_codec: the codec within nodes. The mean is then hierarchical: over several nodes of several ranks, ranks
            sum within nodes first. `Identity()` is full precision. None for a mean that does not depend on nodes.

    Raises:
        TypeError: an argument is not a Compressor.
    """

    codec: Compressor
    intra_codec: Compressor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Compressor):
            raise TypeError(f"MeanCodecs: codec must be a Compressor, got {self.codec!r}")
        if self.intra_codec is not None and not isinstance(self.intra_codec, Compressor):
            raise TypeError(f"MeanCodecs: intra_codec must be a Compressor or None, got {self.intra_codec!r}")

    @property
    def hierarchical(self) -> bool:
        """Whether ranks sum within nodes first."""
        return self.intra_codec is not None

    def for_dtype(self, dtype: torch.dtype) -> "MeanCodecs":
        """Return these codecs, with full precision in place of each that does not encode `dtype`."""
        intra_codec = None if self.intra_codec is None else codec_for_dtype(self.intra_codec, dtype)
        return MeanCodecs(codec_for_dtype(self.codec, dtype), intra_codec)


def codec_for_dtype(codec: Compressor, dtype: torch.dtype) -> Compressor:
    """Return `codec`; or that of full precision, if `codec` does not encode `dtype`."""
    return codec if codec.encodes(dtype) else Identity()
