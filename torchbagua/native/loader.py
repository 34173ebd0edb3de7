"""Makes the compiled kernels available: the built library, else one compiled at first use, else the reference stays.

The dispatcher is the fallback: the reference is registered for every device, and a library that is loaded adds kernels
that take precedence. What is loaded is asked of torch, never remembered here.
"""

import functools
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torchbagua.native import first_use, recipe

NativePath = Literal["aot", "jit", "reference"]

VARIABLE = "TORCHBAGUA_NATIVE"
_ALLOWED: tuple[NativePath, ...] = ("aot", "jit", "reference")
_WAY_OUT = f"{VARIABLE}=reference runs without native kernels (slower, same bytes)"

# Threads of one process; processes are kept apart by first_use.
_one_loader = threading.Lock()


@dataclass(frozen=True)
class Choice:
    """The path that `load` takes for the CPU kernels.

    Attributes:
        path: "aot" (built ahead of time), "jit" (compiled at first use) or "reference" (plain torch).
        library: the file to load, which for "jit" need not exist yet; None for "reference".
        why: the reason, for people.
    """

    path: NativePath
    library: Path | None
    why: str


def load() -> None:
    """Makes the best kernels of this machine available; a second call, from any thread, does nothing.

    Reads the variable TORCHBAGUA_NATIVE: aot, jit or reference allow that path alone. May compile, which takes some
    seconds once per machine. Where there is no library and no compiler the reference kernels stay, and one warning says
    why and what would help.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has another value.
        RuntimeError: a library does not load, the compiler fails, or the path asked for is not to be had.
    """
    with _one_loader:
        forced = forced_path()
        loaded = loaded_library()
        if loaded is not None:
            if forced not in (None, path_of(loaded)):
                raise RuntimeError(f"{VARIABLE}={forced} was set after {loaded} had been loaded, which nothing undoes")
            return
        choice = choose()
        if choice.library is None:
            if forced is None:
                _warn_of_reference(choice.why)
            return
        try:
            if choice.path == "jit":
                first_use.compile_once(choice.library, sources())
            torch.ops.load_library(choice.library)
        except (OSError, RuntimeError) as error:
            cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise RuntimeError(
                f"the native library {choice.library} is not usable ({choice.why}). {_WAY_OUT}. The cause: {cause}"
            ) from error


def choose() -> Choice:
    """Which path `load` takes, and why. Reads the environment and the file system and changes nothing.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has a value that is not allowed.
        RuntimeError: TORCHBAGUA_NATIVE asks for a path that this machine does not have.
    """
    forced = forced_path()
    if forced == "reference":
        return Choice("reference", None, f"{VARIABLE}=reference")
    stem = recipe.library_stem(sources())
    built = Path(__file__).with_name(f"{stem}.abi3.so")
    if forced != "jit" and built.exists():
        return Choice("aot", built, "built ahead of time from the sources that are here")

    why = f"{VARIABLE}=jit" if forced == "jit" else _why_not_built()
    if forced == "aot":
        raise RuntimeError(f"{VARIABLE}=aot, but {why}: `pip install --no-build-isolation` builds it. {_WAY_OUT}")
    compiler = first_use.find_compiler()
    if compiler is None:
        why += f", and there is no C++ compiler ({first_use.compiler_command()[0]} is not on PATH)"
        if forced == "jit":
            raise RuntimeError(f"{why}. {_WAY_OUT}")
        return Choice("reference", None, why)
    return Choice("jit", first_use.library_file(stem), f"{why}; compiled at first use by {compiler}")


def forced_path() -> NativePath | None:
    """The value of TORCHBAGUA_NATIVE, None where it is unset or empty; ValueError where it is not allowed."""
    value = os.environ.get(VARIABLE, "")
    for path in _ALLOWED:
        if value == path:
            return path
    if value:
        raise ValueError(f"{VARIABLE}={value!r}: allowed are {', '.join(_ALLOWED)}, or nothing for the best there is")
    return None


def sources() -> Path:
    """The folder of the C++ sources: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc_cuda"


def loaded_library() -> Path | None:
    """The library of CPU kernels that this process has loaded, None where it runs the reference."""
    for name in torch.ops.loaded_libraries:
        if Path(name).name.startswith(recipe.LIBRARY_PREFIX):
            return Path(name)
    return None


def path_of(library: Path) -> NativePath:
    """Whether a loaded library was built ahead or at first use."""
    return "aot" if library.parent == Path(__file__).parent else "jit"


def _why_not_built() -> str:
    """Why there is no built library to load, in words that continue a sentence."""
    others = sorted(Path(__file__).parent.glob(f"{recipe.LIBRARY_PREFIX}*.so"))
    if others:
        return f"the built library {others[0].name} is not from the sources in {sources()}"
    return "no library was built ahead of time"


@functools.cache
def _warn_of_reference(why: str) -> None:
    """Says once a process that it runs the slow path."""
    warnings.warn(
        f"torchbagua runs its reference kernels, which are many times slower: {why}. A C++ compiler on PATH, or named "
        f"by CXX, gives the fast ones at the next start; {VARIABLE}=reference accepts the slow ones silently.",
        RuntimeWarning,
        stacklevel=3,
    )
