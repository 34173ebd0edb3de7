"""Lookup of codecs by name: checks and resolves every argument that names a codec."""

from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.codecs.base import ALIASES, REGISTRY, Compressor
from torchbagua.codecs.cast import Identity


def check_compression(argument: str, compression: Any) -> str | Compressor | None:
    """Return a codec in the form that algorithms store: None, a Compressor, or its registered name.

    Args:
        argument: the name of the argument, for errors.
        compression: the codec, or its name.

    Raises:
        ValueError: `compression` is not a codec. The message lists the registered names.
    """
    if compression is None or isinstance(compression, Compressor):
        return compression
    name = ALIASES.get(compression, compression) if isinstance(compression, str) else None
    if name not in REGISTRY:
        raise ValueError(f"{argument} must be None, a Compressor or one of {sorted(REGISTRY)}, got {compression!r}")
    return name


def needs_feedback(compression: str | Compressor | None) -> bool:
    """Return `Compressor.needs_feedback` of a codec, given as for `check_compression`."""
    # Read from the class: creating a codec loads the kernels, which the description of an algorithm must not do.
    compression = check_compression("compression", compression)
    codec = REGISTRY[compression] if isinstance(compression, str) else compression
    return getattr(codec, "needs_feedback", False)


def by_name(compression: str | Compressor | None, **options: Any) -> Compressor:
    """Return the codec that is registered under a name.

    Args:
        compression: a name; None for full precision; or a codec, which is returned unchanged.
        options: arguments for the constructor.

    Raises:
        ValueError: no codec has that name. The message lists the registered names.
    """
    compression = check_compression("compression", compression)
    if isinstance(compression, str):
        return REGISTRY[compression](**options)
    return Identity() if compression is None else compression


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
