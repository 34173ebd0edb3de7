"""Compressors: pure functions from tensors to wire bytes and back. No group, no state, no hidden randomness."""

from collections.abc import Callable

from torchbagua.compressors.block_codec import DEFAULT_BLOCK, check_block
from torchbagua.compressors.cast import Cast, Identity
from torchbagua.compressors.compressor import Compressor
from torchbagua.compressors.minmax_uint8 import MinMaxUInt8
from torchbagua.compressors.sign_1bit import Sign1Bit

__all__ = ["DEFAULT_BLOCK", "Cast", "Compressor", "Identity", "MinMaxUInt8", "Sign1Bit", "by_name", "check_block"]

_NAMED: dict[str, Callable[[], Compressor]] = {
    "MinMaxUInt8": MinMaxUInt8,
    "bfloat16": lambda: Cast("bfloat16"),
    "float16": lambda: Cast("float16"),
    "sign1bit": Sign1Bit,
}


def by_name(name: str | Compressor | None) -> Compressor:
    """Return the compressor called `name`; None is full precision, and a compressor is returned as it is.

    Raises:
        ValueError: no compressor has that name; lists those that there are.
    """
    if name is None:
        return Identity()
    if not isinstance(name, str):
        return name
    if name not in _NAMED:
        raise ValueError(f"compression must be None, a Compressor or one of {sorted(_NAMED)}, got {name!r}")
    return _NAMED[name]()
