"""The CUDA kernels as host functions, see cuda_on_host.h, to test their results without a GPU."""

import ctypes
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import programs
from source_tree import COMPILER, REPOSITORY

CSRC = REPOSITORY / "csrc_cuda"
KERNEL_FILES = re.findall(r'#include "(.*)"', (CSRC / "kernels" / "all.cuh").read_text())
OUTCOMES = ("done", "trapped", "stuck")


@functools.cache
def source_of(file: str) -> str:
    """Return a file of kernels after preprocessing, since macros define some kernels."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"there is no C++ compiler ({COMPILER[0]} is not on PATH)")
    command = [*COMPILER, "-E", "-P", "-x", "c++", "-std=c++17", str(CSRC / "kernels" / file)]
    return programs.run(command, timeout_s=200).stdout


def find_kernels(source: str) -> list[str]:
    """Return the names of the kernels in a file."""
    return re.findall(r"\b(torchbagua_\w+)\(", source)


class Span(ctypes.Structure):
    """As in csrc_cuda/element/blocks.h: a tensor of one dimension."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_longlong)]


class Rows(ctypes.Structure):
    """A tensor of two dimensions in the same header: Rows, or Table."""

    _fields_ = [("data", ctypes.c_void_p), ("num_rows", ctypes.c_longlong), ("row_size", ctypes.c_longlong)]


class QAdamStep(ctypes.Structure):
    """As in csrc_cuda/element/qadam.h."""

    _fields_ = [("numbers", ctypes.c_float * 9)]


class QAdamForm(ctypes.Structure):
    """As in csrc_cuda/element/qadam.h."""

    _fields_ = [("numbers", ctypes.c_float * 2)]


class HostKernels:
    """A compiled library of kernels.

    Attributes:
        library: the file that `compile_kernels` built.
    """

    def __init__(self, library: Path) -> None:
        self.library = library
        self._loaded = ctypes.CDLL(str(library))

    def run(self, kernel: str, *arguments: Any, blocks: range, num_blocks: int, num_threads: int) -> str:
        """Run `blocks` of a grid of `num_blocks`; return the outcome, one of OUTCOMES.

        Args:
            kernel: its name.
            arguments: tensors, float, and ctypes structures.
        """
        address = ctypes.c_void_p.in_dll(self._loaded, f"host_{kernel}").value
        assert address
        values = [_as_c(argument) for argument in arguments]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint] * 4, *map(type, values))(address)
        return OUTCOMES[function(blocks.start, blocks.stop, num_blocks, num_threads, *values)]


def _as_c(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return (Span, Rows)[argument.dim() - 1](argument.data_ptr(), *argument.shape)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def compile_kernels(folder: Path) -> None:
    """Compile all kernels for the host, into `folder`/kernels.so; skip the test if there is no compiler."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"there is no C++ compiler ({COMPILER[0]} is not on PATH)")
    lines = [f'#include "{Path(__file__).with_name("cuda_on_host.h")}"']
    for file in KERNEL_FILES:
        lines.append(f'#include "kernels/{file}"')
        for kernel in find_kernels(source_of(file)):
            run = f"cuda_on_host::Host<&torchbagua::cuda::{kernel}>::run"
            lines.append(f'extern "C" {{ auto* host_{kernel} = &{run}; }}')
    (folder / "main.cpp").write_text("\n".join(lines) + "\n")
    command = [*COMPILER, "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    command += ["-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{CSRC}", "main.cpp", "-o", "kernels.so"]
    programs.run(command, cwd=folder, timeout_s=200)
