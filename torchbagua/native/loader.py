"""Makes compiled kernels available: built ahead of time, else compiled at first use, else the reference kernels.

The dispatcher provides the fallback: the plain torch of every operation is registered for every device, and loading
adds kernels that take precedence. This module stores no record of what is loaded; it asks torch.
"""

import ctypes
import functools
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from torchbagua import _torch
from torchbagua._warnings import warn_user
from torchbagua.native import cuda_toolkit, nvrtc, recipe
from torchbagua.native.build import Build, compile_once, find_compiler
from torchbagua.native.cuda_toolkit import Unavailable
from torchbagua.native.launcher import load_registered, register_nvrtc
from torchbagua.native.ops import NATIVE_OPS

NativePath = Literal["aot", "jit", "nvrtc", "reference"]

VARIABLE = "TORCHBAGUA_NATIVE"
_ALLOWED: tuple[NativePath, ...] = ("aot", "jit", "nvrtc", "reference")
_FALLBACK_HINT = f"Set {VARIABLE}=reference to run without native kernels (slower, same bytes)"

# Serializes the threads of this process; build.py serializes processes.
_load_lock = threading.Lock()


@dataclass(frozen=True)
class DeviceKernels:
    """The native kernels of one device type."""

    device: Literal["cpu", "cuda"]
    binary: recipe.Binary  # the library that contains them
    paths: tuple[NativePath, ...]  # the ways to obtain them, the best first
    advice: str  # for the warning that they are missing


CPU = DeviceKernels(
    "cpu",
    recipe.CPU,
    ("aot", "jit"),
    "For fast kernels at the next start, put a C++ compiler on PATH, or set CXX",
)
CUDA = DeviceKernels(
    "cuda",
    recipe.CUDA,
    ("aot", "jit", "nvrtc"),
    "For fast kernels at the next start, run `pip install 'torchbagua[cuda]'`, or install nvcc and a C++ compiler",
)


@dataclass(frozen=True)
class Choice:
    """The path that `load` selects for the kernels of one device type."""

    path: NativePath
    why: str  # for people
    library: Path | None = None  # for "aot" and "jit"; for "jit" the file need not exist yet
    build: Build | None = None  # for "jit"
    compiler: nvrtc.Compiler | None = None  # for "nvrtc"

    def provide(self) -> None:
        """Compiles the kernels if necessary, and loads them."""
        if self.library is not None:
            if self.build is not None:
                compile_once(self.library, self.build)
            torch.ops.load_library(self.library)
        if self.compiler is not None:
            register_nvrtc(self.compiler, capabilities()[0])


def load() -> None:
    """Makes the best kernels for this machine available; a second call, from any thread, does nothing.

    Loads the kernels for the CPU and, if torch can use a GPU, the kernels for CUDA.

    Reads the environment variable TORCHBAGUA_NATIVE. The values aot, jit, nvrtc and reference allow only that path;
    nvrtc applies to CUDA, and the CPU kernels are then selected as usual. May compile, which takes some seconds once
    per machine. If no built library exists and none can be compiled, the reference kernels stay in use, and one warning
    per device type gives the reason and the fix.
    """
    with _load_lock:
        for kernels in usable_devices():
            _load(kernels)


def load_kernels(device: int) -> None:
    """Loads every kernel on a CUDA device that is about to be used, if there are kernels.

    Otherwise CUDA would load each at its first launch. This may wait for all work on the GPU: also for an NCCL
    operation that waits for another rank, which may be in the same situation.
    """
    library = loaded_library(CUDA)
    if library is not None:
        ctypes.CDLL(str(library)).torchbagua_load_kernels(device)
    load_registered(device)


def _load(kernels: DeviceKernels) -> None:
    forced = forced_path(kernels)
    loaded = loaded_path(kernels)
    if loaded is not None:
        if forced not in (None, loaded):
            subject = loaded_library(kernels) or f"the NVRTC kernels for {kernels.device}"
            raise RuntimeError(
                f"{VARIABLE}={forced} was set after {subject} had been loaded, which cannot be undone; set it "
                "before the process starts"
            )
        return
    choice = choose(kernels)
    if choice.path == "reference" and forced is None:
        _warn_of_reference(kernels.device, choice.why, kernels.advice)
    try:
        choice.provide()
    except (ImportError, OSError, RuntimeError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        subject = f"the native library {choice.library}" if choice.library else f"NVRTC for {kernels.device}"
        raise RuntimeError(f"{subject} is not usable ({choice.why}). {_FALLBACK_HINT}. Cause: {cause}") from error


def choose(kernels: DeviceKernels) -> Choice:
    """Returns the path that `load` selects for `kernels`, and why: the first available of aot, jit and nvrtc.

    Changes nothing. Reads the environment and the file system, and for CUDA asks torch for the GPUs of this machine.
    """
    forced = forced_path(kernels)
    if forced == "reference":
        return Choice("reference", f"{VARIABLE}=reference")
    attempts = {"aot": _built_ahead, "jit": _compiled_at_first_use, "nvrtc": _compiled_by_nvrtc}
    reasons = [f"{VARIABLE}={forced}"] if forced else []
    for path in [forced] if forced else kernels.paths:
        try:
            choice = attempts[path](kernels)
        except Unavailable as why:
            reasons.append(str(why))
        else:
            return replace(choice, why="; ".join([", and ".join(reasons), choice.why]) if reasons else choice.why)
    if forced:
        remedy = "`pip install --no-build-isolation` builds it. " if forced == "aot" else ""
        raise RuntimeError(f"{', but '.join(reasons)}. {remedy}{_FALLBACK_HINT}")
    return Choice("reference", ", and ".join(reasons))


def _built_ahead(kernels: DeviceKernels) -> Choice:
    folder = Path(__file__).parent
    library = folder / f"{recipe.stem(kernels.binary, sources())}.abi3.so"
    if library.exists():
        return Choice("aot", "built ahead of time from the current sources", library)
    for other in sorted(folder.glob(f"{kernels.binary.prefix}*.so")):
        raise Unavailable(f"the prebuilt library {other.name} was not built from the sources in {sources()}")
    raise Unavailable(f"no library for {kernels.device} was built ahead of time")


def _compiled_at_first_use(kernels: DeviceKernels) -> Choice:
    compilers = find_compiler()
    build = Build(kernels.binary, sources())
    if kernels is CUDA:
        toolkit = cuda_toolkit.usable_toolkit(torch.version.cuda)
        build = replace(build, toolkit=toolkit, architectures=_architectures_for(toolkit))
        compilers += f" and nvcc {toolkit.version}"
    return Choice("jit", f"compiled at first use by {compilers}", build.library_file(), build)


def _compiled_by_nvrtc(kernels: DeviceKernels) -> Choice:
    compiler = nvrtc.find_compiler(torch.version.cuda, sources())
    return Choice("nvrtc", f"NVRTC {compiler.version} is available", compiler=compiler)


def forced_path(kernels: DeviceKernels) -> NativePath | None:
    """Returns the path that TORCHBAGUA_NATIVE forces for `kernels`, or None; ValueError if its value is not allowed."""
    value = os.environ.get(VARIABLE, "")
    for path in _ALLOWED:
        if value == path:
            return path if path in (*kernels.paths, "reference") else None
    if value:
        raise ValueError(f"{VARIABLE}={value!r} is not allowed: set it to one of {', '.join(_ALLOWED)}, or unset it")
    return None


def usable_devices() -> list[DeviceKernels]:
    """Returns the kernels for the device types that this process can use."""
    return [CPU, CUDA] if torch.cuda.is_available() and not _torch.is_forked_from_cuda() else [CPU]


def capabilities() -> list[int]:
    """Returns the compute capability of every CUDA device, 90 for 9.0; the current device comes first."""
    current = torch.cuda.current_device()
    devices = sorted(range(torch.cuda.device_count()), key=lambda device: device != current)
    found = [torch.cuda.get_device_capability(device) for device in devices]
    return [10 * major + minor for major, minor in found]


def _architectures_for(toolkit: cuda_toolkit.Toolkit) -> tuple[int, ...]:
    """Returns the architectures that `toolkit` supports and must compile for, given the GPUs of this machine."""
    # For a GPU that is too old, the launch raises the error.
    wanted = {max(capability, nvrtc.OLDEST_ARCHITECTURE) for capability in capabilities()}
    return tuple(sorted({cuda_toolkit.nearest_architecture(minimum, toolkit.architectures) for minimum in wanted}))


def sources() -> Path:
    """Returns the folder of the native sources: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc_cuda"


def loaded_library(kernels: DeviceKernels) -> Path | None:
    """Returns the library of `kernels` that this process has loaded, or None."""
    for name in torch.ops.loaded_libraries:
        if Path(name).name.startswith(kernels.binary.prefix):
            return Path(name)
    return None


def loaded_path(kernels: DeviceKernels) -> NativePath | None:
    """Returns the path by which this process has loaded `kernels`; None if it runs the reference."""
    library = loaded_library(kernels)
    if library is not None:
        return "aot" if library.parent == Path(__file__).parent else "jit"
    has_nvrtc = "nvrtc" in kernels.paths and any(has_kernel(operation, kernels) for operation in NATIVE_OPS)
    return "nvrtc" if has_nvrtc else None


def has_kernel(operation: str, kernels: DeviceKernels) -> bool:
    """Returns whether an operation has a loaded and registered native kernel for the device."""
    return _torch.has_kernel(f"torchbagua::{operation}", kernels.device.upper())


@functools.cache
def _warn_of_reference(device: str, why: str, advice: str) -> None:
    """Warns, once per process and device type, that the device runs the slow reference kernels."""
    warn_user(
        f"torchbagua runs its reference kernels for {device}, which are many times slower: {why}. {advice}. "
        f"Set {VARIABLE}=reference to run the slow kernels without this warning."
    )


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
    path: NativePath
    instruction_set: str | None
    library: Path | None
    why: str


def status() -> list[OperationStatus]:
    """Return the status of every operation on every usable device type of this machine, without loading anything."""
    return [
        _status_of(name, kernels)
        for kernels in usable_devices()
        for name in sorted(NATIVE_OPS)
        if kernels.device == "cpu" or not NATIVE_OPS[name].is_cpu_only
    ]


def _status_of(operation: str, kernels: DeviceKernels) -> OperationStatus:
    path = loaded_path(kernels)
    if path is None or not has_kernel(operation, kernels):
        return OperationStatus(operation, kernels.device, "reference", None, None, _why_reference(kernels, path))
    instruction_set = torch.ops.torchbagua.cpu_instruction_set() if kernels.device == "cpu" else None
    library = loaded_library(kernels)
    return OperationStatus(operation, kernels.device, path, instruction_set, library, _WHY[path])


def _why_reference(kernels: DeviceKernels, loaded: NativePath | None) -> str:
    if loaded is not None:
        return f"it has no native kernel for {kernels.device}"
    choice = choose(kernels)
    if choice.path == "reference":
        return choice.why
    return f"no kernels are loaded yet; torchbagua.native.load() will select {choice.path}: {choice.why}"
