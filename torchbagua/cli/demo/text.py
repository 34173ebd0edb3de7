"""Real text that every machine has: the sources of the interpreter's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LIMIT_BYTES = 4_000_000


def read_standard_library(folder: Path | None = None) -> Tensor:
    """Concatenates the top-level modules of the standard library in alphabetical order.

    Args:
        folder: the folder of the ``*.py`` files; the running interpreter's standard library by default.

    Returns:
        uint8 tensor [at most LIMIT_BYTES], the same in every process of one interpreter.

    Raises:
        FileNotFoundError: there are no sources, as with a zipped standard library; the message names the folder.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sorted(folder.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= LIMIT_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"the training text is missing: {folder} has no *.py files")
    return torch.frombuffer(text[:LIMIT_BYTES], dtype=torch.uint8)
