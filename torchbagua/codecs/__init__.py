"""Codecs: functions from tensors to wire bytes and back. No group, no state, no torch.distributed.

May import native and the packages below it.
Begin with base.py, which also finds a codec by its name, then minmax_uint8.py, the smallest codec.

The name of a registered codec denotes the codec with its default options: "minmax_uint8", "minmax_uint4", "bfloat16",
"float16", and "sign1bit", "topk" and "blockk", which need error feedback. Bagua's name "MinMaxUInt8" is an alias.
"""

from torchbagua.codecs.base import (
    DEFAULT_BLOCK,
    Compressor,
    Identity,
    MeanCodecs,
    TensorSpec,
    WireLayout,
    register_compressor,
    sum_dtype,
)
from torchbagua.codecs.block_codec import BlockCodec, NativeBlockCodec
from torchbagua.codecs.blockk import BlockK
from torchbagua.codecs.cast import Cast
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
    "MeanCodecs",
    "MinMaxUInt4",
    "MinMaxUInt8",
    "NativeBlockCodec",
    "Sign1Bit",
    "TensorSpec",
    "TopK",
    "WireLayout",
    "register_compressor",
    "sum_dtype",
]
