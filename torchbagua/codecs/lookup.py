"""Codecs by their names: every argument that names a codec is checked and looked up here."""

from typing import Any

from torchbagua.codecs.base import ALIASES, REGISTRY, Compressor
from torchbagua.codecs.cast import Identity


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
