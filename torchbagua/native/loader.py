"""Makes the compiled kernels available: a library built ahead, else what is compiled at first use, else the reference.

The dispatcher is the fallback: the plain torch of every operation is registered for every device, and what is loaded
adds kernels that take precedence. What is loaded is asked of torch, never remembered here.
"""

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
from torchbagua.native.launcher import register_nvrtc
from torchbagua.native.ops import NATIVE_OPS

NativePath = Literal["aot", "jit", "nvrtc", "reference"]

VARIABLE = "TORCHBAGUA_NATIVE"
_ALLOWED: tuple[NativePath, ...] = ("aot", "jit", "nvrtc", "reference")
_WAY_OUT = f"{VARIABLE}=reference runs without native kernels (slower, same bytes)"

# Threads of one process; processes are kept apart by build.py.
_one_loader = threading.Lock()


@dataclass(frozen=True)
class DeviceKernels:
    """The native kernels of one type of device.

    Attributes:
        device: the type, as torch writes it.
        binary: what they are built from.
        paths: the ways to come by them, the best first.
        advice: what would give them where they are missing.
    """

    device: Literal["cpu", "cuda"]
    binary: recipe.Binary
    paths: tuple[NativePath, ...]
    advice: str


CPU = DeviceKernels(
    "cpu",
    recipe.CPU,
    ("aot", "jit"),
    "A C++ compiler on PATH, or named by CXX, gives the fast ones at the next start",
)
CUDA = DeviceKernels(
    "cuda",
    recipe.CUDA,
    ("aot", "jit", "nvrtc"),
    "`pip install 'torchbagua[cuda]'`, or nvcc and a C++ compiler, gives the fast ones at the next start",
)


@dataclass(frozen=True)
class Choice:
    """The path that `load` takes for the kernels of one device.

    Attributes:
        path: "aot" (built ahead of time), "jit" (compiled at first use), "nvrtc" (the same, for CUDA without nvcc) or
            "reference" (plain torch).
        why: the reason, for people.
        library: the file to load, which for "jit" need not exist yet; None for "nvrtc" and "reference".
        build: how it is compiled, for "jit".
        compiler: what compiles the kernels, for "nvrtc".
    """

    path: NativePath
    why: str
    library: Path | None = None
    build: Build | None = None
    compiler: nvrtc.Compiler | None = None

    def provide(self) -> None:
        """Compiles where it has to, and loads."""
        if self.library is not None:
            if self.build is not None:
                compile_once(self.library, self.build)
            torch.ops.load_library(self.library)
        if self.compiler is not None:
            register_nvrtc(self.compiler, capabilities()[0])


def load() -> None:
    """Makes the best kernels of this machine available; a second call, from any thread, does nothing.

    They are those for the CPU and, where there is a GPU that torch can use, those for CUDA.

    Reads the variable TORCHBAGUA_NATIVE: aot, jit, nvrtc or reference allow that path alone; nvrtc concerns CUDA, the
    CPU's kernels are then chosen as usual. May compile, which takes some seconds once per machine. Where nothing built
    is there and nothing can be compiled the reference kernels stay, and one warning per device says why and what would
    help.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has another value.
        RuntimeError: a library does not load, a compiler fails, or the path asked for is not to be had.
    """
    with _one_loader:
        for kernels in usable_devices():
            _load(kernels)


def _load(kernels: DeviceKernels) -> None:
    forced = forced_path(kernels)
    loaded = loaded_path(kernels)
    if loaded is not None:
        if forced not in (None, loaded):
            what = loaded_library(kernels) or f"kernels for {kernels.device} by NVRTC"
            raise RuntimeError(f"{VARIABLE}={forced} was set after {what} had been loaded, which nothing undoes")
        return
    choice = choose(kernels)
    if choice.path == "reference" and forced is None:
        _warn_of_reference(kernels.device, choice.why, kernels.advice)
    try:
        choice.provide()
    except (ImportError, OSError, RuntimeError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        what = f"the native library {choice.library}" if choice.library else f"NVRTC for {kernels.device}"
        raise RuntimeError(f"{what} is not usable ({choice.why}). {_WAY_OUT}. The cause: {cause}") from error


def choose(kernels: DeviceKernels) -> Choice:
    """Which path `load` takes for `kernels`, and why: the first of aot, jit and nvrtc that can be had. Changes nothing.

    Reads the environment and the file system, and for CUDA asks torch which GPUs there are.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has a value that is not allowed.
        RuntimeError: TORCHBAGUA_NATIVE asks for a path that this machine does not have.
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
        raise RuntimeError(f"{', but '.join(reasons)}. {remedy}{_WAY_OUT}")
    return Choice("reference", ", and ".join(reasons))


def _built_ahead(kernels: DeviceKernels) -> Choice:
    folder = Path(__file__).parent
    library = folder / f"{recipe.stem(kernels.binary, sources())}.abi3.so"
    if library.exists():
        return Choice("aot", "built ahead of time from the sources that are here", library)
    for other in sorted(folder.glob(f"{kernels.binary.prefix}*.so")):
        raise Unavailable(f"the built library {other.name} is not from the sources in {sources()}")
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
    return Choice("nvrtc", f"NVRTC {compiler.version} is here", compiler=compiler)


def forced_path(kernels: DeviceKernels) -> NativePath | None:
    """What TORCHBAGUA_NATIVE says of `kernels`, None for nothing; ValueError where it is not allowed."""
    value = os.environ.get(VARIABLE, "")
    for path in _ALLOWED:
        if value == path:
            return path if path in (*kernels.paths, "reference") else None
    if value:
        raise ValueError(f"{VARIABLE}={value!r}: allowed are {', '.join(_ALLOWED)}, or nothing for the best there is")
    return None


def usable_devices() -> list[DeviceKernels]:
    """Those that this process can use."""
    return [CPU, CUDA] if torch.cuda.is_available() and not _torch.is_forked_from_cuda() else [CPU]


def capabilities() -> list[int]:
    """The compute capability of every CUDA device, 90 for 9.0, the current device's first."""
    current = torch.cuda.current_device()
    devices = sorted(range(torch.cuda.device_count()), key=lambda device: device != current)
    found = [torch.cuda.get_device_capability(device) for device in devices]
    return [10 * major + minor for major, minor in found]


def _architectures_for(toolkit: cuda_toolkit.Toolkit) -> tuple[int, ...]:
    """What to compile for with `toolkit`, of what it knows, for the GPUs that are there."""
    # What a GPU that is too old is then told comes from the launch.
    wanted = {max(capability, nvrtc.OLDEST_ARCHITECTURE) for capability in capabilities()}
    return tuple(sorted({cuda_toolkit.nearest_architecture(one, toolkit.architectures) for one in wanted}))


def sources() -> Path:
    """The folder of the native sources: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc_cuda"


def loaded_library(kernels: DeviceKernels) -> Path | None:
    """The library of `kernels` that this process has loaded, None where there is none."""
    for name in torch.ops.loaded_libraries:
        if Path(name).name.startswith(kernels.binary.prefix):
            return Path(name)
    return None


def loaded_path(kernels: DeviceKernels) -> NativePath | None:
    """How this process has come by `kernels`, None where it runs the reference."""
    library = loaded_library(kernels)
    if library is not None:
        return "aot" if library.parent == Path(__file__).parent else "jit"
    return "nvrtc" if any(has_kernel(operation, kernels) for operation in NATIVE_OPS) else None


def has_kernel(operation: str, kernels: DeviceKernels) -> bool:
    """Whether an operation has a native kernel for the device, loaded and registered."""
    return _torch.has_kernel(f"torchbagua::{operation}", kernels.device.upper())


@functools.cache
def _warn_of_reference(device: str, why: str, advice: str) -> None:
    """Says once a process that a device takes the slow path."""
    warn_user(
        f"torchbagua runs its reference kernels for {device}, which are many times slower: {why}. {advice}; "
        f"{VARIABLE}=reference accepts the slow ones silently."
    )
