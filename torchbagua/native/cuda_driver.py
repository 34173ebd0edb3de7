"""Loads and launches compiled CUDA kernels through the driver, beside torch: in its contexts, on its streams."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# What a kernel is given for one of its parameters: bytes of the same layout.
Parameter = ctypes.c_float | ctypes.Array[Any] | ctypes.Structure


@dataclass(frozen=True)
class LoadedKernels:
    """Kernels on one device.

    Attributes:
        device: its index.
        context: the device's primary one, which torch uses too.
        module: what was loaded.
        functions: the kernels found so far, by name.
    """

    device: int
    context: object
    module: object
    functions: dict[str, object]


class Driver:
    """The CUDA driver, as `cuda.bindings.driver` gives it.

    Args:
        bindings: that module.
        current_stream: the handle of torch's current stream of a device.
    """

    def __init__(self, bindings: ModuleType, current_stream: Callable[[int], int]) -> None:
        self._bindings = bindings
        self._current_stream = current_stream

    def capability(self, device: int) -> int:
        """The compute capability of a device, 90 for 9.0."""
        attributes = self._bindings.CUdevice_attribute
        (handle,) = self._call("cuDeviceGet", device)
        parts = (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self._call("cuDeviceGetAttribute", part, handle)[0] for part in parts)
        return int(major) * 10 + int(minor)

    def require_version(self, compiler: str) -> None:
        """RuntimeError where the driver is for an older CUDA than the one that compiled the kernels, say "13.0"."""
        (version,) = self._call("cuDriverGetVersion")
        if version // 1000 < int(compiler.split(".")[0]):
            raise RuntimeError(
                f"the NVIDIA driver is too old: it is for CUDA {version // 1000}.{version % 1000 // 10}, NVRTC is of "
                f"CUDA {compiler}; a newer driver, or an NVRTC and cuda-python of the driver's version, is needed, or "
                "TORCHBAGUA_NATIVE=reference (plain torch)"
            )

    def load(self, device: int, image: bytes) -> LoadedKernels:
        """Brings compiled kernels to a device, which has a context from then on; RuntimeError where it refuses them."""
        (handle,) = self._call("cuDeviceGet", device)
        (context,) = self._call("cuDevicePrimaryCtxRetain", handle)
        with self._inside(context):
            (module,) = self._call("cuModuleLoadData", image)
        return LoadedKernels(device, context, module, {})

    def launch(
        self, kernels: LoadedKernels, name: str, num_blocks: int, num_threads: int, parameters: Sequence[Parameter]
    ) -> None:
        """Enqueues a kernel on the current stream of its device and waits for nothing.

        Args:
            kernels: where it was loaded.
            name: the kernel's.
            num_blocks: the length of the grid, in thread blocks.
            num_threads: of a thread block.
            parameters: one for each of the kernel's.

        Raises:
            RuntimeError: the driver refuses the launch, or an earlier kernel has failed.
        """
        addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        shape = (num_blocks, 1, 1, num_threads, 1, 1)
        stream = self._current_stream(kernels.device)
        # A thread that has called no CUDA function yet, such as one of autograd's, has no current context.
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
        """The results of a function of the driver; RuntimeError where it fails."""
        result, *results = getattr(self._bindings, function)(*arguments)
        if result != self._bindings.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function} of the CUDA driver failed: {result.name}")
        return tuple(results)
