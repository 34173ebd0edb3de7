"""Registers the CUDA kernels that NVRTC compiles with torch's dispatcher: the counterpart of bind_cuda.cu.

They are loaded and launched through the CUDA driver, in torch's contexts and on torch's streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchbagua.native.nvrtc import OLDEST_ARCHITECTURE, Compiler
from torchbagua.native.ops import NATIVE_OPS, names_of
from torchbagua.native.tensor_tables import TABLE_THREADS, tables_of

# As in csrc_cuda/kernels/blocks.cuh and cuda/launch.h: one thread block per row of the table, up to LARGEST_GRID.
THREADS = 64
LARGEST_GRID = 2**31 - 1

# As in the last line of a codec's file in csrc_cuda/kernels: the rows that a thread block processes concurrently, for
# codecs with more than one.
NUM_TEAMS = {"minmax_uint4": 8, "sign1bit": 2}

# The parameter type for a tensor, by its number of dimensions.
_LONGS = tuple(ctypes.c_longlong * (1 + num_dims) for num_dims in range(3))

# The argument for one parameter of a kernel: bytes of the same layout.
Parameter = ctypes.c_float | ctypes.Array[Any] | ctypes.Structure

_NAMES = re.compile(rb"(?:\.text\.|\.entry )(torchbagua_\w+)")  # of kernels, in machine code and in PTX


@dataclass(frozen=True)
class LoadedKernels:
    """The kernels of one module, loaded on one device."""

    device: int
    context: object  # the primary context of the device, which torch uses too
    module: object
    functions: dict[str, object]  # the kernels looked up so far, by name


class CudaKernels:
    """The kernels of all devices. Each takes the arguments of its operation."""

    def __init__(self, compiler: Compiler, driver: Driver) -> None:
        self._compiler = compiler
        self._driver = driver
        self._lock = threading.Lock()
        self._images: dict[int, bytes] = {}
        self._loaded: dict[int, LoadedKernels] = {}

    def prepare(self, capability: int) -> None:
        """Compiles for a compute capability, 90 for 9.0, before the first launch; RuntimeError if NVRTC fails."""
        with self._lock:
            self._image(capability)

    def load_on(self, device: int) -> None:
        """Loads the kernels of a device before the first launch, which raises the error if they do not load."""
        with contextlib.suppress(RuntimeError):
            self._on(device)

    def register(self) -> None:
        """Makes torch call these kernels for CUDA tensors until the process ends.

        A codec without kernels in the sources keeps its plain-torch implementation.
        """
        for name, operation in NATIVE_OPS.items():
            if not operation.is_cpu_only and self._compiler.has_source(f"kernels/{operation.family}.cuh"):
                torch.library.impl(f"torchbagua::{name}", "cuda", functools.partial(self.call, name))

    def call(self, name: str, *arguments: Any, **numbers: float) -> None:
        """Checks the arguments of an operation and launches its kernels on their device, without waiting."""
        NATIVE_OPS[name].check(*arguments, **numbers)
        if isinstance(arguments[0], list):
            self._launch_over_lists(name, arguments, numbers)
        else:
            self._launch_over_blocks(name, arguments)

    def _launch_over_blocks(self, name: str, arguments: Sequence[Any]) -> None:
        """Launches one kernel over the rows of the argument `table`."""
        names = _names_of_arguments(name)
        table = arguments[names.index("table")]
        kernel = f"{name}_{names_of(arguments[names.index('x')].dtype)}" if "x" in names else name
        num_blocks = -(-table.shape[0] // NUM_TEAMS.get(NATIVE_OPS[name].family, 1))
        self._launch(kernel, table, num_blocks, THREADS, [_parameter(argument) for argument in arguments])

    def _launch_over_lists(self, name: str, lists: Sequence[list[Tensor]], numbers: dict[str, float]) -> None:
        """Launches kernels over the tensors of `lists`; the dtype of each momentum selects the kernel."""
        names = _names_of_arguments(name)
        constants = [numbers[argument] for argument in names[len(lists) :]] + NATIVE_OPS[name].derived_numbers(numbers)
        kernel_numbers = (ctypes.c_float * len(constants))(*constants)
        for table, first in tables_of(lists, lists[names.index("momenta")]):
            kernel = f"{name}_{names_of(first.dtype)}"
            self._launch(kernel, first, table.num_chunks, TABLE_THREADS, [table, kernel_numbers])

    def _launch(
        self, kernel: str, placement: Tensor, num_blocks: int, num_threads: int, parameters: Sequence[Parameter]
    ) -> None:
        """Launches `num_blocks` thread blocks, if any, on the device of the tensor `placement`."""
        if num_blocks == 0:
            return
        kernels = self._on(placement.get_device())
        self._driver.launch(kernels, f"torchbagua_{kernel}", min(num_blocks, LARGEST_GRID), num_threads, parameters)

    def _on(self, device: int) -> LoadedKernels:
        """Returns the kernels of a device; compiles and loads them at the first call."""
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


class Driver:
    """The CUDA driver, accessed through `cuda.bindings.driver`."""

    def __init__(self, bindings: ModuleType, current_stream: Callable[[int], int]) -> None:
        self._bindings = bindings
        self._current_stream = current_stream

    def capability(self, device: int) -> int:
        """Returns the compute capability of a device, 90 for 9.0."""
        attributes = self._bindings.CUdevice_attribute
        (handle,) = self._call("cuDeviceGet", device)
        parts = (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self._call("cuDeviceGetAttribute", part, handle)[0] for part in parts)
        return int(major) * 10 + int(minor)

    def require_version(self, compiler: str) -> None:
        """Raises RuntimeError if the driver's CUDA has an older major version than `compiler`, such as "13.0"."""
        (version,) = self._call("cuDriverGetVersion")
        if version // 1000 < int(compiler.split(".")[0]):
            raise RuntimeError(
                f"the NVIDIA driver is too old: it supports CUDA {version // 1000}.{version % 1000 // 10}, but NVRTC "
                f"is from CUDA {compiler}; install a newer driver, or an NVRTC and cuda-python of the driver's "
                "version, or set TORCHBAGUA_NATIVE=reference (plain torch)"
            )

    def load(self, device: int, image: bytes) -> LoadedKernels:
        """Loads compiled kernels on a device, and retains its context; RuntimeError if the driver rejects them.

        By default, CUDA loads each kernel only when its function is requested, which may wait for all work on the GPU:
        also for an NCCL operation that waits for another rank in the same situation. So this requests all of them.
        """
        (handle,) = self._call("cuDeviceGet", device)
        (context,) = self._call("cuDevicePrimaryCtxRetain", handle)
        with self._inside(context):
            (module,) = self._call("cuModuleLoadData", image)
            names = {name.decode() for name in _NAMES.findall(image)}
            functions = {name: self._call("cuModuleGetFunction", module, name.encode())[0] for name in sorted(names)}
        return LoadedKernels(device, context, module, functions)

    def launch(
        self, kernels: LoadedKernels, name: str, num_blocks: int, num_threads: int, parameters: Sequence[Parameter]
    ) -> None:
        """Enqueues a kernel on the current stream of its device and returns without waiting."""
        addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        shape = (num_blocks, 1, 1, num_threads, 1, 1)
        stream = self._current_stream(kernels.device)
        # A thread that has not called any CUDA function yet, such as an autograd thread, has no current context.
        with self._inside(kernels.context):
            function = kernels.functions.get(name)
            if function is None:
                (function,) = self._call("cuModuleGetFunction", kernels.module, name.encode())
                kernels.functions[name] = function
            # The driver copies the parameters before it returns.
            self._call("cuLaunchKernel", function, *shape, 0, stream, ctypes.addressof(addresses), 0)

    @contextlib.contextmanager
    def _inside(self, context: object) -> Iterator[None]:
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, function: str, *arguments: object) -> tuple[Any, ...]:
        """Calls a driver function and returns its results; RuntimeError if it fails."""
        result, *results = getattr(self._bindings, function)(*arguments)
        if result != self._bindings.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function} of the CUDA driver failed: {result.name}")
        return tuple(results)


@functools.cache
def _names_of_arguments(name: str) -> list[str]:
    """Returns the names of an operation's arguments, in order."""
    return [argument.name for argument in getattr(torch.ops.torchbagua, name).default._schema.arguments]


def _parameter(value: Tensor | float) -> Parameter:
    """Converts to the layout of csrc_cuda/element/blocks.h: a tensor's data, then the sizes of its dimensions."""
    if isinstance(value, Tensor):
        shape = value.shape
        return _LONGS[len(shape)](value.data_ptr(), *shape)
    return ctypes.c_float(value)


_registered: list[CudaKernels] = []


def load_registered(device: int) -> None:
    """Loads the kernels that `register_nvrtc` has registered, if any, on a CUDA device."""
    for kernels in _registered:
        kernels.load_on(device)


def register_nvrtc(compiler: Compiler, capability: int) -> None:
    """Registers the kernels that NVRTC compiles: for `capability` now, for other GPUs at their first launch."""
    # If the NVRTC bindings of cuda-python import, so do these. Unlike nvrtc.py, they need the CUDA driver.
    from cuda.bindings import driver

    kernels = CudaKernels(compiler, Driver(driver, _current_stream))
    # A GPU that is too old may only drive the screen: having it is not an error, but launching on it is.
    if capability >= OLDEST_ARCHITECTURE:
        kernels.prepare(capability)
    kernels.register()
    _registered.append(kernels)


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
