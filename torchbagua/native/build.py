"""Compiles a native library when it is first needed, into a cache that all processes of a user share.

Many processes may come at once and any may be killed. The library is compiled in a private folder and renamed into
place when it is known to load. What happens to the file later, on a disk that is full or a machine that goes down, the
digest at its end shows: to load a library that was cut short would end the process. A lock of the operating system,
which ends with the process that holds it, makes one process compile while the others wait.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from torchbagua.native import recipe
from torchbagua.native.cuda_toolkit import Toolkit, Unavailable

# Compiling takes some ten seconds, for CUDA half a minute; a machine that needs longer than this for it hangs.
COMPILE_TIMEOUT_S = 600.0

# In a process of its own: torch.utils.cpp_extension wants ninja on PATH, where this process may not have it; it imports
# setuptools, which replaces distutils; and a library that does not load is found out before it is in the cache.
_COMPILE = """
import json, sys
import torch.utils.cpp_extension
try:
    torch.utils.cpp_extension.load(**json.loads(sys.argv[1]))
except (ImportError, OSError, RuntimeError) as error:
    sys.exit(str(error))
"""


def cache_folder() -> Path:
    """Where compiled libraries are kept: $TORCHBAGUA_CACHE, else torchbagua below $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("TORCHBAGUA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchbagua"


def compiler_command() -> list[str]:
    """The words of the C++ compiler that torch uses: $CXX, else c++. Raises ValueError for words that do not end."""
    command = os.environ.get("CXX", "").strip() or "c++"
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"CXX must be a command, got {command!r}: {error}") from error


def find_compiler() -> str:
    """The path of the C++ compiler; raises Unavailable."""
    name = compiler_command()[0]
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"there is no C++ compiler ({name} is not on PATH; CXX names another)")
    return found


def ninja_folder() -> Path | None:
    """The folder of the ninja to compile with: that of the ninja package, wherever PATH points, else PATH's own."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        return Path(ninja.BIN_DIR)
    found = shutil.which("ninja")
    return Path(found).parent if found else None


@dataclass(frozen=True)
class Build:
    """One compilation.

    Attributes:
        binary: what is compiled.
        csrc: the folder of its sources.
        toolkit: the CUDA toolkit to compile with, where CUDA is.
        architectures: the compute capabilities that it is compiled for, 90 for 9.0, where CUDA is.
    """

    binary: recipe.Binary
    csrc: Path
    toolkit: Toolkit | None = None
    architectures: tuple[int, ...] = ()

    def library_file(self) -> Path:
        """Where the library lies in the cache, compiled or not.

        Its folder is keyed by torch's version, the machine and the compilers; its name by sources and flags.
        """
        stem = recipe.stem(self.binary, self.csrc)
        version = subprocess.run([*compiler_command(), "--version"], capture_output=True, check=False)
        key = hashlib.sha256(version.stdout)
        words = [stem, torch.__version__, platform.machine(), *compiler_command()]
        if self.toolkit is not None:
            words += [f"CUDA {self.toolkit.version}", *map(str, self.architectures)]
        for word in words:
            key.update(b"\0" + word.encode())
        return cache_folder() / key.hexdigest()[:16] / f"{stem}.so"

    def arguments(self) -> dict[str, Any]:
        """What torch.utils.cpp_extension.load is given, apart from names and places."""
        arguments: dict[str, Any] = {
            "sources": [str(self.csrc / self.binary.source)],
            "extra_cflags": list(self.binary.cxx_flags),
            "extra_include_paths": [str(self.csrc)],
            "extra_ldflags": list(self.binary.ldflags),
            "with_cuda": self.toolkit is not None,
        }
        if self.toolkit is not None:
            arguments["extra_cuda_cflags"] = [*self.binary.nvcc_flags, *recipe.gencode_flags(self.architectures)]
            arguments["extra_ldflags"] += [f"-L{folder}" for folder in self.toolkit.library_folders()]
        return arguments


def compile_once(library: Path, build: Build) -> None:
    """Compiles `build` to `library`, or waits while another process does; nothing where it is there and whole.

    Raises:
        RuntimeError: the compiler failed, with its output; it, or the process waited for, took longer than
            COMPILE_TIMEOUT_S; or the cache folder cannot be made.
        OSError: the cache folder cannot be written.
    """
    if read_sealed(library):
        return
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"no folder for it: {error}; TORCHBAGUA_CACHE names another cache folder") from None
    lock = library.with_name("lock")
    try:
        held = filelock.FileLock(lock, timeout=COMPILE_TIMEOUT_S).acquire()
    except filelock.Timeout:
        raise RuntimeError(f"another process has held {lock} for {COMPILE_TIMEOUT_S:.0f} s") from None
    with held:
        if read_sealed(library):
            return
        # Only a process that was stopped leaves one of these: whoever compiles holds the lock.
        for left_over in library.parent.glob("build-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as folder:
            compiled = _compile(library.stem, build, Path(folder))
            seal(compiled)
            os.replace(compiled, library)


def _compile(stem: str, build: Build, folder: Path) -> Path:
    """Compiles and, in a process of its own, loads the library; returns its file, in `folder`."""
    arguments = {**build.arguments(), "name": stem, "build_directory": str(folder), "is_python_module": False}
    ninja = ninja_folder()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*([str(ninja)] if ninja else []), os.environ.get("PATH", os.defpath)]),
        # This process may have found torch in ways that a new one would not.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
    }
    if build.toolkit is not None:
        environment["CUDA_HOME"] = str(build.toolkit.folder)
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _COMPILE, json.dumps(arguments)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(COMPILE_TIMEOUT_S)
        except BaseException as error:
            # To the child and its ninja, which ends the compilers that it has put in groups of their own.
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"compiling took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
            raise
    if status != 0:
        raise RuntimeError(f"compiling failed:\n{log.read_text(errors='replace').strip()}")
    return folder / f"{stem}.so"


_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(file: Path) -> None:
    """Append its digest to a file that is written completely, and that nobody else sees yet.

    At the end, since the loader of shared libraries takes a file that goes on after its last section.
    """
    digest = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(digest)


def read_sealed(file: Path) -> bytes | None:
    """Return what was sealed; None where there is no such file or it was cut short or altered."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    return content if content and hashlib.sha256(content).digest() == digest else None
