"""How native code is compiled: for each library its sources, its flags and the digest of both.

The one place for them. `setup.py` runs this file by path, before torch or torchbagua can be imported, and the loader
imports it: so it needs nothing beyond the standard library.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A fused multiply-add rounds once where the reference rounds twice, and its bytes would differ.
_CXX_FLAGS = (
    "-O3",
    # Python's own flags, which setuptools adds, ask for debug information.
    "-g0",
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

_KERNEL_FLAGS = ("-std=c++17", "--fmad=false")
_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


class Binary(NamedTuple):
    """What is compiled into one file.

    Attributes:
        prefix: how the file's name begins; the digest follows.
        source: the file to compile, below `csrc_cuda`; the rest of it is reached from there by #include.
        cxx_flags: of the C++ compiler.
        nvcc_flags: of nvcc, or of NVRTC.
        ldflags: of the linker.
    """

    prefix: str
    source: str
    cxx_flags: tuple[str, ...] = ()
    nvcc_flags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()


CPU = Binary("libtorchbagua_cpu_", "bind_cpu.cpp", cxx_flags=_CXX_FLAGS)

CUDA = Binary(
    "libtorchbagua_cuda_",
    "bind_cuda.cu",
    nvcc_flags=(
        "-O3",
        *_KERNEL_FLAGS,
        "-Xcompiler=-fvisibility=hidden",
        # Declares the stable ABI's functions for CUDA.
        "-DUSE_CUDA",
        *(flag for flag in _CXX_FLAGS if flag.startswith("-DTORCH_TARGET_VERSION")),
    ),
    # Only what is used: torch adds the CUDA runtime as a shared library, which would tie this one to a CUDA version.
    ldflags=("-Wl,--as-needed", "-lcudart_static", "-lrt", "-lpthread", "-ldl"),
)

# The kernels alone, without a binding.
NVRTC = Binary("torchbagua_nvrtc_", "kernels/all.cuh", nvcc_flags=_KERNEL_FLAGS)

# The compute capabilities, 75 for 7.5, that a library built ahead holds machine code for, where nvcc knows them. Within
# a major version it runs on all later minor ones; PTX of the newest is for GPUs to come.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

# The limited API that a built-ahead library claims in its wheel's name; no Python header is included.
PYTHON_TAG = "cp310"


def gencode_flags(architectures: Sequence[int]) -> list[str]:
    """The flags of nvcc for machine code of `architectures`, and for PTX of the newest of them."""
    flags = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures]
    newest = max(architectures)
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def stem(binary: Binary, csrc: Path) -> str:
    """The name, without its suffix, of the file that `binary` is compiled to.

    It ends with a digest of the flags and of all sources, so that a library built ahead that is older than its sources
    is never taken for theirs. A change to any of them compiles every binary again: which of them one includes need not
    be known here.

    Args:
        binary: what is compiled.
        csrc: the folder `csrc_cuda`, in a checkout or as installed.

    Raises:
        FileNotFoundError: `csrc` does not hold the source.
    """
    if not (csrc / binary.source).is_file():
        raise FileNotFoundError(f"the native sources of torchbagua are not in {csrc}: {binary.source} is missing")
    digest = hashlib.sha256("\0".join((*binary.cxx_flags, *binary.nvcc_flags, *binary.ldflags)).encode())
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in _SUFFIXES):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{binary.prefix}{digest.hexdigest()[:16]}"
