"""Loads and launches compiled CUDA kernels through the driver, in torch's contexts and on torch's streams."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# The argument for one parameter of a kernel: bytes of the same layout.
Parameter = ctypes.c_float | ctypes.Array[Any] | ctypes.Structure


_NAMES = re.compile(rb"(?:\.text\.|\.entry )(torchbagua_\w+)")  # of kernels, in machine code and in PTX


@dataclass(frozen=True)
class LoadedKernels:
    """Kernels loaded on one device.

    Attributes:
        device: the device index.
        context: the primary context of the device, which torch uses too.
        module: the loaded module.
        functions: the kernels looked up so far, by name.
    """

    device: int
    context: object
    module: object
    functions: dict[str, object]


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
