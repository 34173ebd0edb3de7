"""Reports which kernels every native operation runs, and why."""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchbagua.native import loader
from torchbagua.native.loader import DeviceKernels
from torchbagua.native.ops import NATIVE_OPS

_WHY = {
    "aot": "built ahead of time",
    "jit": "compiled at first use",
    "nvrtc": "compiled by NVRTC at first use",
}


@dataclass(frozen=True)
class OperationStatus:
    """The kernel that runs when `torchbagua::<operation>` is called on a tensor on `device`.

    Attributes:
        operation: the operation's name, without its namespace.
        device: "cpu" or "cuda".
        path: "aot" (library built ahead of time), "jit" (compiled at first use), "nvrtc" (the same, for CUDA without
            nvcc) or "reference" (plain torch).
        instruction_set: "avx512", "avx2" or "default" (portable) for native CPU kernels, else None.
        library: the loaded file; None for NVRTC and the reference.
        why: the reason, in human-readable form.
    """

    operation: str
    device: str
    path: loader.NativePath
    instruction_set: str | None
    library: Path | None
    why: str


def status() -> list[OperationStatus]:
    """Return the status of every operation on every usable device type of this machine, without loading anything."""
    return [
        _status_of(name, kernels)
        for kernels in loader.usable_devices()
        for name in sorted(NATIVE_OPS)
        if kernels.device == "cpu" or not NATIVE_OPS[name].is_cpu_only
    ]


def _status_of(operation: str, kernels: DeviceKernels) -> OperationStatus:
    path = loader.loaded_path(kernels)
    if path is None or not loader.has_kernel(operation, kernels):
        return OperationStatus(operation, kernels.device, "reference", None, None, _why_reference(kernels, path))
    instruction_set = torch.ops.torchbagua.cpu_instruction_set() if kernels.device == "cpu" else None
    library = loader.loaded_library(kernels)
    return OperationStatus(operation, kernels.device, path, instruction_set, library, _WHY[path])


def _why_reference(kernels: DeviceKernels, loaded: loader.NativePath | None) -> str:
    if loaded is not None:
        return f"it has no native kernel for {kernels.device}"
    choice = loader.choose(kernels)
    if choice.path == "reference":
        return choice.why
    return f"no kernels are loaded yet; torchbagua.native.load() will select {choice.path}: {choice.why}"
