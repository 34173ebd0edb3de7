"""The codecs of a mean, with full precision instead of a codec that does not encode a dtype."""

from dataclasses import dataclass

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity


@dataclass(frozen=True)
class MeanCodecs:
    """The codecs that ranks use to send the tensors that they average.

    Args:
        codec: the codec between all ranks; with an `intra_codec`, between nodes.
        intra_codec: the codec within nodes. The mean is then hierarchical: on multi-node jobs with several ranks per
            node, ranks sum within nodes first. `Identity()` is full precision. None for a mean that ignores nodes.

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
        """Whether ranks sum within nodes before they communicate between nodes."""
        return self.intra_codec is not None

    def for_dtype(self, dtype: torch.dtype) -> "MeanCodecs":
        """Return these codecs, with full precision instead of each codec that does not encode `dtype`."""
        intra_codec = None if self.intra_codec is None else codec_for_dtype(self.intra_codec, dtype)
        return MeanCodecs(codec_for_dtype(self.codec, dtype), intra_codec)


def codec_for_dtype(codec: Compressor, dtype: torch.dtype) -> Compressor:
    """Return `codec`, or the codec of full precision if `codec` does not encode `dtype`."""
    return codec if codec.encodes(dtype) else Identity()
