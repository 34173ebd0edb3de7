"""Codecs: functions from tensors to wire bytes and back. No group, no state, no torch.distributed.

May import native and what is below it.
Begin with base.py, then minmax_uint8.py, the smallest codec.
"""

from typing import Any

from torchbagua.codecs.base import DEFAULT_BLOCK, REGISTRY, Compressor, register_compressor, sum_dtype
from torchbagua.codecs.block_codec import BlockCodec, NativeBlockCodec, check_block
from torchbagua.codecs.blockk import BlockK
from torchbagua.codecs.blocks import TensorSpec, WireLayout
from torchbagua.codecs.cast import Cast, Identity
from torchbagua.codecs.minmax_uint4 import MinMaxUInt4
from torchbagua.codecs.minmax_uint8 import MinMaxUInt8
from torchbagua.codecs.sign1bit import Sign1Bit
from torchbagua.codecs.topk import TopK

__all__ = [
    "DEFAULT_BLOCK",
    "BlockCodec",
    "BlockK",
    "Cast",
    "Compressor",
    "Identity",
    "MinMaxUInt4",
    "MinMaxUInt8",
    "NativeBlockCodec",
    "Sign1Bit",
    "TensorSpec",
    "TopK",
    "WireLayout",
    "by_name",
    "check_block",
    "check_compression",
    "needs_feedback",
    "register_compressor",
    "sum_dtype",
]


def check_compression(argument: str, compression: object) -> None:
    """Raise ValueError unless it is what an algorithm takes, and `by_name`. `argument` is how the error names it."""
    if compression is None or isinstance(compression, Compressor):
        return
    if not isinstance(compression, str) or compression not in REGISTRY:
        raise ValueError(f"{argument} must be None, a Compressor or one of {sorted(REGISTRY)}, got {compression!r}")


def needs_feedback(compression: str | Compressor | None) -> bool:
    """Return `Compressor.needs_feedback` of what `check_compression` takes."""
    # Of the class: making a codec loads the kernels, which is not for a description of an algorithm to do.
    codec = REGISTRY[compression] if isinstance(compression, str) else compression
    return getattr(codec, "needs_feedback", False)


def by_name(compression: str | Compressor | None, **options: Any) -> Compressor:
    """Return the compressor that is registered by a name.

    Args:
        compression: a name; None for full precision; or a compressor, which is returned as it is.
        options: arguments for the constructor.

    Raises:
        ValueError: no compressor has that name; lists the names.
    """
    if compression is None:
        return Identity()
    if isinstance(compression, Compressor):
        return compression
    check_compression("compression", compression)
    return REGISTRY[compression](**options)
