"""What differs between the devices that have native kernels; loader.py has what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torchbagua.native import cuda_toolkit, first_use, nvrtc, recipe
from torchbagua.native.cuda_driver import Driver
from torchbagua.native.launcher import CudaKernels
from torchbagua.torch_private import is_forked_from_cuda

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class DeviceKernels:
    """The native kernels of one type of device.

    Attributes:
        device: the type, as torch writes it.
        binary: what they are built from.
        operation: one that they all have.
        find_build: how they are compiled at first use from the folder of sources given, or why not, in words.
        find_nvrtc: NVRTC, given the same, or why not, in words; None for a device that it is not for.
        advice: what would give them where they are missing.
    """

    device: DeviceType
    binary: recipe.Binary
    operation: str
    find_build: Callable[[Path], first_use.Build | str]
    find_nvrtc: Callable[[Path], nvrtc.Compiler | str] | None
    advice: str


def here() -> list[DeviceKernels]:
    """Those of the devices that this process can use."""
    return [CPU, CUDA] if torch.cuda.is_available() and not is_forked_from_cuda() else [CPU]


def capabilities() -> list[int]:
    """The compute capability of every CUDA device, 90 for 9.0, the current device's first."""
    current = torch.cuda.current_device()
    devices = sorted(range(torch.cuda.device_count()), key=lambda device: device != current)
    found = [torch.cuda.get_device_capability(device) for device in devices]
    return [10 * major + minor for major, minor in found]


def register_nvrtc(compiler: nvrtc.Compiler) -> None:
    """Gives torch the kernels that NVRTC compiles: for the current device now, for others at their first launch.

    Raises:
        RuntimeError: NVRTC fails, with its output.
    """
    # Where there is NVRTC's half of cuda-python there is this one. It needs the driver, which nvrtc.py does not.
    from cuda.bindings import driver

    def current_stream(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    kernels = CudaKernels(compiler, Driver(driver, current_stream))
    # A GPU that is too old may be there for the screen alone: it is an error to launch on it, not to have it.
    capability = capabilities()[0]
    if capability >= nvrtc.OLDEST_ARCHITECTURE:
        kernels.prepare(capability)
    kernels.register()


def _find_cpu_build(csrc: Path) -> first_use.Build | str:
    if first_use.find_compiler() is None:
        return f"there is no C++ compiler ({first_use.compiler_command()[0]} is not on PATH)"
    return first_use.Build(recipe.CPU, csrc)


def _find_cuda_build(csrc: Path) -> first_use.Build | str:
    host = _find_cpu_build(csrc)
    if isinstance(host, str):
        return host
    toolkit = cuda_toolkit.usable_toolkit(torch.version.cuda)
    if isinstance(toolkit, str):
        return toolkit
    # What a GPU that is too old is then told comes from the launch.
    wanted = {max(capability, nvrtc.OLDEST_ARCHITECTURE) for capability in capabilities()}
    known = {cuda_toolkit.nearest_architecture(capability, toolkit.architectures) for capability in wanted}
    return first_use.Build(recipe.CUDA, csrc, toolkit, tuple(sorted(known)))


def _find_nvrtc(csrc: Path) -> nvrtc.Compiler | str:
    return nvrtc.find_compiler(torch.version.cuda, csrc)


CPU = DeviceKernels(
    "cpu",
    recipe.CPU,
    "minmax_uint8_encode",
    _find_cpu_build,
    None,
    "A C++ compiler on PATH, or named by CXX, gives the fast ones at the next start",
)
CUDA = DeviceKernels(
    "cuda",
    recipe.CUDA,
    "minmax_uint8_encode",
    _find_cuda_build,
    _find_nvrtc,
    "`pip install 'torchbagua[cuda]'`, or nvcc and a C++ compiler, gives the fast ones at the next start",
)
