"""Files of the cache that end with the digest of all before it, by which one that was cut short or altered is known.

At the end, since the loader of shared libraries takes a file that goes on after its last section.
"""

import hashlib
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(file: Path) -> None:
    """Append the digest to a file that is written completely, and that nobody else sees yet."""
    digest = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(digest)


def read_sealed(file: Path) -> bytes | None:
    """Return what was sealed; None where there is no such file or it is not whole."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    return content if content and hashlib.sha256(content).digest() == digest else None
