"""The CUDA kernels that NVRTC compiles, as operations on torch's dispatcher: what bind_cuda.cu is in C++."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchbagua.native.cuda_driver import Driver, LoadedKernels, Parameter
from torchbagua.native.nvrtc import OLDEST_ARCHITECTURE, Compiler
from torchbagua.native.ops import NATIVE_OPS, names_of
from torchbagua.native.tensor_tables import TABLE_THREADS, tables_of

# As in csrc_cuda/kernels/blocks.cuh and cuda/launch.h: a thread block for each row of the table, up to so many.
THREADS = 64
LARGEST_GRID = 2**31 - 1

# As in the last line of a codec's file in csrc_cuda/kernels: how many rows a thread block takes at once, where it is
# not one.
NUM_TEAMS = {"minmax_uint4": 8, "sign1bit": 2}

# The parameter for a tensor, by the number of its dimensions.
_LONGS = tuple(ctypes.c_longlong * (1 + num_dims) for num_dims in range(3))


class CudaKernels:
    """The kernels of all devices; they take the arguments of their operations.

    Args:
        compiler: what compiles them, once for each compute capability.
        driver: what runs them.
    """

    def __init__(self, compiler: Compiler, driver: Driver) -> None:
        self._compiler = compiler
        self._driver = driver
        self._lock = threading.Lock()
        self._images: dict[int, bytes] = {}
        self._loaded: dict[int, LoadedKernels] = {}

    def prepare(self, capability: int) -> None:
        """Compiles for a compute capability, 90 for 9.0, ahead of the first launch; RuntimeError where NVRTC fails."""
        with self._lock:
            self._image(capability)

    def register(self) -> None:
        """Makes torch call these kernels for CUDA tensors, for as long as the process lasts.

        A codec that has none among the sources keeps its plain torch.
        """
        for name, operation in NATIVE_OPS.items():
            if not operation.is_of_cpus and self._compiler.has_source(f"kernels/{operation.family}.cuh"):
                torch.library.impl(f"torchbagua::{name}", "cuda", functools.partial(self.call, name))

    def call(self, name: str, *arguments: Any, **numbers: float) -> None:
        """Checks the arguments of an operation, and launches what it takes where they are; waits for nothing."""
        NATIVE_OPS[name].check(*arguments, **numbers)
        if isinstance(arguments[0], list):
            self._launch_over_lists(name, arguments, numbers)
        else:
            self._launch_over_blocks(name, arguments)

    def _launch_over_blocks(self, name: str, arguments: Sequence[Any]) -> None:
        """Launches over the rows of the table among the arguments."""
        names = _names_of_arguments(name)
        table = arguments[names.index("table")]
        kernel = f"{name}_{names_of(arguments[names.index('x')].dtype)}" if "x" in names else name
        num_blocks = -(-table.shape[0] // NUM_TEAMS.get(NATIVE_OPS[name].family, 1))
        self._launch(kernel, table, num_blocks, THREADS, [_parameter(argument) for argument in arguments])

    def _launch_over_lists(self, name: str, lists: Sequence[list[Tensor]], numbers: dict[str, float]) -> None:
        """Launches over the tensors of `lists`, by kernels for the element types of the momenta."""
        names = _names_of_arguments(name)
        constants = [numbers[one] for one in names[len(lists) :]] + NATIVE_OPS[name].derived_numbers(numbers)
        of_kernel = (ctypes.c_float * len(constants))(*constants)
        for table, first in tables_of(lists, lists[names.index("momenta")]):
            kernel = f"{name}_{names_of(first.dtype)}"
            self._launch(kernel, first, table.num_chunks, TABLE_THREADS, [table, of_kernel])

    def _launch(
        self, kernel: str, there: Tensor, num_blocks: int, num_threads: int, parameters: Sequence[Parameter]
    ) -> None:
        """Launches thread blocks where the tensor `there` is; none is nothing to do."""
        if num_blocks == 0:
            return
        kernels = self._on(there.get_device())
        self._driver.launch(kernels, f"torchbagua_{kernel}", min(num_blocks, LARGEST_GRID), num_threads, parameters)

    def _on(self, device: int) -> LoadedKernels:
        """The kernels on a device, compiled and loaded when first asked for."""
        loaded = self._loaded.get(device)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(device)
                if loaded is None:
                    self._driver.require_version(self._compiler.version)
                    image = self._image(self._driver.capability(device))
                    loaded = self._loaded[device] = self._driver.load(device, image)
        return loaded

    def _image(self, capability: int) -> bytes:
        if capability not in self._images:
            self._images[capability] = self._compiler.image_for(capability)
        return self._images[capability]


@functools.cache
def _names_of_arguments(name: str) -> list[str]:
    """Of the operation, in their order."""
    return [argument.name for argument in getattr(torch.ops.torchbagua, name).default._schema.arguments]


def _parameter(value: Tensor | float) -> Parameter:
    """As csrc_cuda/element/blocks.h declares it: a tensor's data and the sizes of its dimensions."""
    if isinstance(value, Tensor):
        shape = value.shape
        return _LONGS[len(shape)](value.data_ptr(), *shape)
    return ctypes.c_float(value)


def register_nvrtc(compiler: Compiler, capability: int) -> None:
    """Gives torch the kernels that NVRTC compiles: for `capability` now, for other GPUs at their first launch.

    Raises:
        RuntimeError: NVRTC fails, with its output.
    """
    # Where there is NVRTC's half of cuda-python there is this one. It needs the driver, which nvrtc.py does not.
    from cuda.bindings import driver

    kernels = CudaKernels(compiler, Driver(driver, _current_stream))
    # A GPU that is too old may be there for the screen alone: it is an error to launch on it, not to have it.
    if capability >= OLDEST_ARCHITECTURE:
        kernels.prepare(capability)
    kernels.register()


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
