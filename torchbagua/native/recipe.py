"""How the native CPU library is compiled: its sources, its flags and the digest of both.

The one place for them. `setup.py` runs this file by path, before torch or torchbagua can be imported, and the loader
imports it: so it needs nothing beyond the standard library.
"""

import hashlib
from pathlib import Path

# The rest of `csrc_cuda` is reached from here by #include.
CPU_SOURCE = "bind_cpu.cpp"

COMPILE_FLAGS = (
    "-O3",
    # Python's own flags, which setuptools adds, ask for debug information.
    "-g0",
    # A fused multiply-add rounds once where the reference rounds twice, and its bytes would differ.
    "-ffp-contract=off",
    # A square root of a negative number need not be reported, so that loops with one are vectorised.
    "-fno-math-errno",
    # Vectorises the marked loops; no OpenMP runtime is linked.
    "-fopenmp-simd",
    "-fvisibility=hidden",
    # LibTorch's stable ABI of torch 2.10: one build loads on that version and on later ones.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
# No -march: the instruction set is chosen when the library is loaded, so that a build from one machine runs on another.

LIBRARY_PREFIX = "libtorchbagua_cpu_"

# The limited API that a built-ahead library claims in its wheel's name; no Python header is included.
PYTHON_TAG = "cp310"


def sources_digest(csrc: Path) -> str:
    """Names what a library is built from: 16 hexadecimal digits over the C++ files below `csrc` and the flags.

    A built-ahead library carries it in its file name, so one that is older than its sources is never taken for theirs.
    The CUDA kernels (.cuh) are no part of it.

    Args:
        csrc: the folder `csrc_cuda`, in a checkout or as installed.

    Raises:
        FileNotFoundError: `csrc` holds no `bind_cpu.cpp`.
    """
    if not (csrc / CPU_SOURCE).is_file():
        raise FileNotFoundError(f"the C++ sources of torchbagua are not in {csrc}: {CPU_SOURCE} is missing")
    digest = hashlib.sha256("\0".join(COMPILE_FLAGS).encode())
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in (".cpp", ".h")):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_stem(csrc: Path) -> str:
    """The name, without its suffix, of the library that is built from the sources in `csrc`."""
    return f"{LIBRARY_PREFIX}{sources_digest(csrc)}"
