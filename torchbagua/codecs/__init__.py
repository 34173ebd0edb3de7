"""Codecs: functions from tensors to wire bytes and back. No group, no state, no torch.distributed.

May import native and what is below it.
Begin with base.py, then minmax_uint8.py, the smallest codec.

A registered codec has a name, which stands for it with its default options: "minmax_uint8", "minmax_uint4", "bfloat16",
"float16", and "sign1bit", "topk" and "blockk", which need error feedback. The name "MinMaxUInt8", Bagua's, is an alias.
"""

from typing import Any

from torchbagua.codecs.base import ALIASES, DEFAULT_BLOCK, REGISTRY, Compressor, register_compressor, sum_dtype
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


def check_compression(argument: str, compression: Any) -> str | Compressor | None:
    """Return a codec as algorithms keep it: None, a Compressor, or its registered name.

    Args:
        argument: how an error names the argument.
        compression: the codec, or its name.

    Raises:
        ValueError: it is none of these; lists the names.
    """
    if compression is None or isinstance(compression, Compressor):
        return compression
    name = ALIASES.get(compression, compression) if isinstance(compression, str) else None
    if name not in REGISTRY:
        raise ValueError(f"{argument} must be None, a Compressor or one of {sorted(REGISTRY)}, got {compression!r}")
    return name


def needs_feedback(compression: str | Compressor | None) -> bool:
    """Return `Compressor.needs_feedback` of what `check_compression` takes."""
    # Of the class: making a codec loads the kernels, which is not for a description of an algorithm to do.
    compression = check_compression("compression", compression)
    codec = REGISTRY[compression] if isinstance(compression, str) else compression
    return getattr(codec, "needs_feedback", False)


def by_name(compression: str | Compressor | None, **options: Any) -> Compressor:
    """Return the codec that is registered by a name.

    Args:
        compression: a name; None for full precision; or a codec, which is returned as it is.
        options: arguments for the constructor.

    Raises:
        ValueError: no codec has that name; lists the names.
    """
    compression = check_compression("compression", compression)
    if isinstance(compression, str):
        return REGISTRY[compression](**options)
    return Identity() if compression is None else compression
