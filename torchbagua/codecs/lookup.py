"""Lookup of codecs by name: checks and resolves every argument that names a codec."""

from typing import Any

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
