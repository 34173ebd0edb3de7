"""Makes the compiled kernels available: a built library, else what is compiled at first use, else the reference stays.

The dispatcher is the fallback: the reference is registered for every device, and a library that is loaded adds kernels
that take precedence. What is loaded is asked of torch, never remembered here.
"""

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from torchbagua import torch_private
from torchbagua.native import devices, first_use, recipe
from torchbagua.native.devices import DeviceKernels
from torchbagua.user_warning import warn_user

NativePath = Literal["aot", "jit", "nvrtc", "reference"]

VARIABLE = "TORCHBAGUA_NATIVE"
_ALLOWED: tuple[NativePath, ...] = ("aot", "jit", "nvrtc", "reference")
_WAY_OUT = f"{VARIABLE}=reference runs without native kernels (slower, same bytes)"

# Threads of one process; processes are kept apart by first_use.
_one_loader = threading.Lock()


def _nothing() -> None:
    """The reference is registered when torchbagua is imported."""


@dataclass(frozen=True)
class Choice:
    """The path that `load` takes for the kernels of one device.

    Attributes:
        path: "aot" (built ahead of time), "jit" (compiled at first use), "nvrtc" (the same, for CUDA without nvcc) or
            "reference" (plain torch).
        library: the file to load, which for "jit" need not exist yet; None for "nvrtc" and "reference".
        why: the reason, for people.
        provide: does it.
    """

    path: NativePath
    library: Path | None
    why: str
    provide: Callable[[], None] = field(default=_nothing, compare=False, repr=False)


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
        for kernels in devices.here():
            _load(kernels)


def choose(kernels: DeviceKernels) -> Choice:
    """Which path `load` takes for `kernels`, and why. Changes nothing.

    Reads the environment and the file system, and for CUDA asks torch which GPUs there are.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has a value that is not allowed.
        RuntimeError: TORCHBAGUA_NATIVE asks for a path that this machine does not have.
    """
    forced = forced_path(kernels)
    if forced == "reference":
        return Choice("reference", None, f"{VARIABLE}=reference")
    built = Path(__file__).with_name(f"{recipe.stem(kernels.binary, sources())}.abi3.so")
    if forced in (None, "aot") and built.exists():
        load_built = functools.partial(torch.ops.load_library, built)
        return Choice("aot", built, "built ahead of time from the sources that are here", load_built)
    if forced == "aot":
        raise RuntimeError(
            f"{VARIABLE}=aot, but {_why_not_built(kernels)}: `pip install --no-build-isolation` builds it. {_WAY_OUT}"
        )

    obstacles = [_why_not_built(kernels)] if forced is None else [f"{VARIABLE}={forced}"]
    if forced in (None, "jit"):
        build = kernels.find_build(sources())
        if isinstance(build, first_use.Build):
            return _compiled_at_first_use(build, obstacles[0])
        obstacles.append(build)
    if forced in (None, "nvrtc") and kernels.find_nvrtc is not None:
        compiler = kernels.find_nvrtc(sources())
        if not isinstance(compiler, str):
            why = ", and ".join([*obstacles, f"NVRTC {compiler.version} is here"])
            return Choice("nvrtc", None, why, functools.partial(devices.register_nvrtc, compiler))
        obstacles.append(compiler)
    why = ", and ".join(obstacles)
    if forced is not None:
        raise RuntimeError(f"{why}. {_WAY_OUT}")
    return Choice("reference", None, why)


def forced_path(kernels: DeviceKernels) -> NativePath | None:
    """What TORCHBAGUA_NATIVE says of `kernels`, None for nothing; ValueError where it is not allowed."""
    value = os.environ.get(VARIABLE, "")
    for path in _ALLOWED:
        if value == path:
            return None if path == "nvrtc" and kernels.find_nvrtc is None else path
    if value:
        raise ValueError(f"{VARIABLE}={value!r}: allowed are {', '.join(_ALLOWED)}, or nothing for the best there is")
    return None


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
    return "nvrtc" if has_kernel(kernels.operation, kernels) else None


def has_kernel(operation: str, kernels: DeviceKernels) -> bool:
    """Whether an operation has a native kernel for the device, loaded and registered."""
    return torch_private.has_kernel(f"torchbagua::{operation}", kernels.device.upper())


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


def _compiled_at_first_use(build: first_use.Build, why: str) -> Choice:
    compilers = str(first_use.find_compiler())
    if build.toolkit is not None:
        compilers += f" and nvcc {build.toolkit.version}"
    library = build.library_file()

    def compile_and_load() -> None:
        first_use.compile_once(library, build)
        torch.ops.load_library(library)

    return Choice("jit", library, f"{why}; compiled at first use by {compilers}", compile_and_load)


def _why_not_built(kernels: DeviceKernels) -> str:
    """Why there is no built library to load, in words that continue a sentence."""
    others = sorted(Path(__file__).parent.glob(f"{kernels.binary.prefix}*.so"))
    if others:
        return f"the built library {others[0].name} is not from the sources in {sources()}"
    return f"no library for {kernels.device} was built ahead of time"


@functools.cache
def _warn_of_reference(device: str, why: str, advice: str) -> None:
    """Says once a process that a device takes the slow path."""
    warn_user(
        f"torchbagua runs its reference kernels for {device}, which are many times slower: {why}. {advice}; "
        f"{VARIABLE}=reference accepts the slow ones silently."
    )
