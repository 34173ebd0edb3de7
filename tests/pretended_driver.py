"""A fake CUDA driver, which runs the kernels on the host: CUDA's operations, launched as NVRTC's kernels are."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import torch

from host_kernels import KERNEL_FILES, HostKernels, QAdamForm, QAdamStep, Rows, Span, source_of
from torchbagua.native import nvrtc, tensor_tables
from torchbagua.native.launcher import CudaKernels, Driver

STREAM = 77


class CUresult(Enum):
    """The results that the fake driver returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_LAUNCH_FAILED = 719


class Trapped(RuntimeError):
    """A kernel has ended itself."""


@functools.cache
def c_types_of(kernel: str) -> list[Any]:
    """Return the ctypes types of a kernel's parameters, as its source declares them."""
    (declared,) = re.findall(rf"\b{kernel}\(([^)]*)\)", "\n".join(map(source_of, KERNEL_FILES)))
    return [_c_type_of(re.sub(r"\s*\w+$", "", parameter.strip())) for parameter in declared.split(",")]


def _c_type_of(parameter: str) -> Any:
    if parameter.startswith("Span<"):
        return Span
    if parameter.startswith(("RowTable<", "Grid<")):
        return Rows
    for name, num_pointers in {"QAdamTensors<": 4, "FormTensors<": 2}.items():
        if name in parameter:
            return tensor_tables.table_type(num_pointers)
    c_types = {"Rows": Rows, "Table": Rows, "float": ctypes.c_float, "QAdamStep": QAdamStep, "QAdamForm": QAdamForm}
    return c_types[parameter]


def run_on_host(host: HostKernels, kernel: str, num_blocks: int, num_threads: int, parameters: int) -> None:
    """Run a kernel; the addresses of its arguments are at the address `parameters`, as a launch passes them."""
    kinds = c_types_of(kernel)
    places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
    values = [kind.from_address(place) for kind, place in zip(kinds, places, strict=True)]
    ended = host.run(kernel, *values, blocks=range(num_blocks), num_blocks=num_blocks, num_threads=num_threads)
    if ended != "done":
        raise Trapped(f"{kernel} is {ended}")


@dataclass
class PretendedDriver:
    """A fake `cuda.bindings.driver` that runs kernels on the host: a module is its image, a function its kernel's name.

    Attributes:
        host: the kernels; None to launch nothing.
        version: CUDA's version, as the driver encodes it.
        calls: the called functions with their arguments, and the shape of every launch.
    """

    host: HostKernels | None = None
    version: int = 13010
    capabilities: tuple[int, ...] = (90, 90)
    failing: str = ""
    calls: list[Any] = field(default_factory=list)
    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )

    def __getattr__(self, function: str) -> Callable[..., tuple[Any, ...]]:
        answers = {
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDeviceGet": lambda device: (device,),
            "cuDeviceGetAttribute": lambda part, device: (
                self.capabilities[device] // 10 if part == "major" else self.capabilities[device] % 10,
            ),
            "cuDevicePrimaryCtxRetain": lambda device: (f"context {device}",),
            "cuModuleLoadData": lambda image: (image,),
            "cuModuleGetFunction": lambda module, name: (name.decode(),),
            "cuCtxPushCurrent": lambda context: (),
            "cuCtxPopCurrent": lambda: ("a context",),
            "cuLaunchKernel": self._launch,
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            if function != "cuLaunchKernel":
                self.calls.append((function, *arguments))
            if function == self.failing:
                return (CUresult.CUDA_ERROR_LAUNCH_FAILED,)
            return (CUresult.CUDA_SUCCESS, *answers[function](*arguments))

        return call

    def _launch(self, kernel: str, *rest: int) -> tuple[()]:
        *shape, shared_bytes, stream, parameters, extra = rest
        self.calls.append(("cuLaunchKernel", kernel, tuple(shape), shared_bytes, stream, extra))
        if self.host is not None:
            run_on_host(self.host, kernel, shape[0], shape[3], parameters)
        return ()


class PretendedCompiler:
    """A fake of NVRTC's compiler: an image names its compute capability."""

    def __init__(self) -> None:
        self.version = "13.0"
        self.compiled: list[int] = []

    def image_for(self, capability: int) -> bytes:
        self.compiled.append(capability)
        return f"for {capability} .text.torchbagua_low_rank_gram\0.text.torchbagua_low_rank_gram\0".encode()


def kernels_on(driver: PretendedDriver, compiler: PretendedCompiler | None = None) -> CudaKernels:
    """Return the launcher of kernels on a fake driver."""
    bindings = cast(Any, driver)
    return CudaKernels(cast(nvrtc.Compiler, compiler or PretendedCompiler()), Driver(bindings, lambda _: STREAM))


class HostOperation:
    """An operation of CUDA tensors, for CPU tensors: its kernels are launched as on a GPU, and run on the host."""

    def __init__(self, host: HostKernels, name: str) -> None:
        self._schema = getattr(torch.ops.torchbagua, name).default._schema
        self._call = functools.partial(kernels_on(PretendedDriver(host)).call, name)

    def __call__(self, **arguments: Any) -> None:
        in_order = [arguments.pop(argument.name) for argument in self._schema.arguments if not argument.kwarg_only]
        self._call(*in_order, **arguments)
