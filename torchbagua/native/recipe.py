"""How native code is compiled: the sources of each library, its flags, and a digest of both.

This file is the single source for them. `setup.py` runs it by path, before torch or torchbagua can be imported, and the
loader imports it, so it needs only the standard library.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A fused multiply-add rounds once, but the reference rounds twice, so the bytes would differ.
_CXX_FLAGS = (
    "-O3",
    # Python's own flags, which setuptools adds, request debug information.
    "-g0",
    "-ffp-contract=off",
    # Without errno for the square root of a negative number, loops with square roots are vectorized.
    "-fno-math-errno",
    # Vectorizes the marked loops; no OpenMP runtime is linked.
    "-fopenmp-simd",
    "-fvisibility=hidden",
    # LibTorch's stable ABI of torch 2.10: one build loads on that version and on later versions.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
# No -march: the instruction set is selected when the library is loaded, so a build runs on other machines. build.py
# restricts a library that is compiled at first use to the instruction set of its machine.

_KERNEL_FLAGS = ("-std=c++17", "--fmad=false")
_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


class Binary(NamedTuple):
    """A library, or an image of kernels, that is compiled into one file.

    Attributes:
        prefix: the start of the file name; the digest follows.
        sources: the files to compile, as a pattern in `csrc_cuda`; they include the other sources of the library.
        cxx_flags: the flags of the C++ compiler.
        nvcc_flags: the flags of nvcc or NVRTC.
        ldflags: the flags of the linker.
    """

    prefix: str
    sources: str
    cxx_flags: tuple[str, ...] = ()
    nvcc_flags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()


# One file for each codec, so that a compilation uses all cores.
CPU = Binary("libtorchbagua_cpu_", "cpu/*.cpp", cxx_flags=_CXX_FLAGS)

CUDA = Binary(
    "libtorchbagua_cuda_",
    "bind_cuda.cu",
    nvcc_flags=(
        "-O3",
        *_KERNEL_FLAGS,
        "-Xcompiler=-fvisibility=hidden",
        # Declares the CUDA functions of the stable ABI.
        "-DUSE_CUDA",
        *(flag for flag in _CXX_FLAGS if flag.startswith("-DTORCH_TARGET_VERSION")),
    ),
    # --as-needed drops the shared CUDA runtime that torch adds, which would tie this library to one CUDA version.
    ldflags=("-Wl,--as-needed", "-lcudart_static", "-lrt", "-lpthread", "-ldl"),
)

# The kernels only, without bindings.
NVRTC = Binary("torchbagua_nvrtc_", "kernels/all.cuh", nvcc_flags=_KERNEL_FLAGS)

# The compute capabilities, 75 for 7.5, for which a library built ahead of time contains machine code if nvcc supports
# them. Machine code runs on all later minor versions of its major version; PTX of the newest is for future GPUs.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

# The limited API that the wheel of a library built ahead of time claims in its name; no Python header is included.
PYTHON_TAG = "cp310"


def gencode_flags(architectures: Sequence[int]) -> list[str]:
    """Return the nvcc flags for machine code of `architectures` and PTX of the newest of them."""
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    newest = max(architectures)
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def source_files(binary: Binary, csrc: Path) -> list[Path]:
    """Return the files to compile. Raises FileNotFoundError if `csrc` contains none."""
    files = sorted(csrc.glob(binary.sources))
    if not files:
        raise FileNotFoundError(f"the native sources of torchbagua are not in {csrc}: {binary.sources} is missing")
    return files


def stem(binary: Binary, csrc: Path) -> str:
    """Return the name, without its suffix, of the file that `binary` is compiled to.

    The name ends with a digest of the flags and of all sources, so that a library from older sources is never mistaken
    for one from the current sources. A change to any source recompiles every binary, so the includes need not be
    tracked.
    """
    source_files(binary, csrc)
    digest = hashlib.sha256("\0".join((*binary.cxx_flags, *binary.nvcc_flags, *binary.ldflags)).encode())
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in _SUFFIXES):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{binary.prefix}{digest.hexdigest()[:16]}"
