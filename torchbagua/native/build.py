"""Compiles a native library when it is first needed, into a cache shared by all processes of a user.

Many processes may compile concurrently, and any of them may be killed. The library is compiled in a private folder and
renamed into place once it is known to load. A digest at the end of the file detects later damage, such as from a full
disk or a machine that goes down: loading a truncated library would kill the process. A lock of the operating system,
which is released when the process that holds it ends, makes one process compile while the others wait.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from torchbagua.native import recipe
from torchbagua.native.cuda_toolkit import Toolkit, Unavailable

# Compiling takes one to two minutes on one core; a machine that exceeds this timeout is hung.
COMPILE_TIMEOUT_S = 600.0
_POLL_S = 0.2

# Runs in a separate process: torch.utils.cpp_extension needs ninja on PATH, which this process may lack; it imports
# setuptools, which replaces distutils; and a library that does not load is detected before it is in the cache.
_COMPILE = """
import json, sys
import torch.utils.cpp_extension
try:
    torch.utils.cpp_extension.load(**json.loads(sys.argv[1]))
except (ImportError, OSError, RuntimeError) as error:
    sys.exit(str(error))
"""


def cache_folder() -> Path:
    """Returns the cache folder: $TORCHBAGUA_CACHE, else torchbagua in $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("TORCHBAGUA_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchbagua"


def compiler_command() -> list[str]:
    """Returns the command of the C++ compiler that torch uses, $CXX or c++. Raises ValueError for an unclosed quote."""
    command = os.environ.get("CXX", "").strip() or "c++"
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"CXX must be a command, got {command!r}: {error}") from error


def find_compiler() -> str:
    """Returns the path of the C++ compiler; raises Unavailable."""
    name = compiler_command()[0]
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"no C++ compiler was found ({name} is not on PATH; set CXX to use another)")
    return found


def ninja_folder() -> Path | None:
    """Returns the folder of the ninja to compile with: the ninja package first, whatever PATH says, then PATH."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        return Path(ninja.BIN_DIR)
    found = shutil.which("ninja")
    return Path(found).parent if found else None


def instruction_set_flag() -> str:
    """Returns the flag that compiles CPU kernels only for the vector instructions that torch uses on this machine.

    Kernels for all instruction sets take more than twice as long to compile.
    """
    names = {"AVX512": "kAvx512", "AVX2": "kAvx2"}
    return f"-DTORCHBAGUA_INSTRUCTION_SET={names.get(torch.backends.cpu.get_cpu_capability(), 'kDefault')}"


@dataclass(frozen=True)
class Build:
    """The compilation of a library from the sources in a folder."""

    binary: recipe.Binary
    csrc: Path
    toolkit: Toolkit | None = None  # for the CUDA library
    architectures: tuple[int, ...] = ()  # the compute capabilities of the CUDA library, 90 for 9.0

    def name(self) -> str:
        """Returns the name of the library for the user."""
        return "the CPU kernels" if self.toolkit is None else "the CUDA kernels"

    def library_file(self) -> Path:
        """Returns the path of the library in the cache, whether it is compiled or not.

        The folder is keyed by torch's version, the machine, its vector instructions and the compilers; the name by
        sources and flags.
        """
        stem = recipe.stem(self.binary, self.csrc)
        version = subprocess.run([*compiler_command(), "--version"], capture_output=True, check=False)
        key = hashlib.sha256(version.stdout)
        words = [stem, torch.__version__, platform.machine(), *compiler_command()]
        if self.toolkit is None:
            words.append(instruction_set_flag())
        else:
            words += [f"CUDA {self.toolkit.version}", *map(str, self.architectures)]
        for word in words:
            key.update(b"\0" + word.encode())
        return cache_folder() / key.hexdigest()[:16] / f"{stem}.so"

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of torch.utils.cpp_extension.load, except for names and paths."""
        arguments: dict[str, Any] = {
            "sources": list(map(str, recipe.source_files(self.binary, self.csrc))),
            "extra_cflags": list(self.binary.cxx_flags),
            "extra_include_paths": [str(self.csrc)],
            "extra_ldflags": list(self.binary.ldflags),
            "with_cuda": self.toolkit is not None,
        }
        if self.toolkit is None:
            arguments["extra_cflags"].append(instruction_set_flag())
        else:
            arguments["extra_cuda_cflags"] = [*self.binary.nvcc_flags, *recipe.gencode_flags(self.architectures)]
            arguments["extra_ldflags"] += [f"-L{folder}" for folder in self.toolkit.library_folders()]
        return arguments


def compile_once(library: Path, build: Build) -> None:
    """Compiles `build` to `library`, or waits for a process that does, unless `library` exists and is intact."""
    if read_sealed(library):
        return
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"cannot create the cache folder: {error}; set TORCHBAGUA_CACHE to another one") from None
    lock = library.with_name("lock")
    try:
        held = filelock.FileLock(lock, timeout=COMPILE_TIMEOUT_S).acquire()
    except filelock.Timeout:
        raise RuntimeError(f"another process has held the lock {lock} for {COMPILE_TIMEOUT_S:.0f} s") from None
    with held:
        if read_sealed(library):
            return
        # Only a killed process leaves such a folder behind: a process that compiles holds the lock.
        for left_over in library.parent.glob("build-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as folder:
            compiled = _compile(library.stem, build, Path(folder))
            seal(compiled)
            os.replace(compiled, library)


def _compile(stem: str, build: Build, folder: Path) -> Path:
    """Compiles the library and loads it, in a separate process; returns its file, in `folder`."""
    arguments = {**build.arguments(), "name": stem, "build_directory": str(folder), "is_python_module": False}
    ninja = ninja_folder()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*([str(ninja)] if ninja else []), os.environ.get("PATH", os.defpath)]),
        # A new process may lack the path entries by which this process found torch.
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
            status = _wait(child, CompileProgress(build.name(), folder, len(arguments["sources"])))
        except BaseException:
            # Signals the child and its ninja. Ninja ends its compilers, which it runs in separate process groups.
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
    if status != 0:
        raise RuntimeError(f"compilation failed:\n{log.read_text(errors='replace').strip()}")
    return folder / f"{stem}.so"


class CompileProgress:
    """One line on stderr. On a terminal, `show` updates it with the number of compiled files and the time."""

    def __init__(self, subject: str, folder: Path, num_sources: int) -> None:
        self._text = f"torchbagua: compiling {subject}, once per machine"
        self._folder = folder
        self._num_sources = num_sources
        self._start_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        if not self._is_terminal:
            self._write(f"{self._text}\n")

    def show(self) -> None:
        """Update the line."""
        if self._is_terminal:
            num_compiled = len(list(self._folder.glob("*.o")))
            passed_s = time.monotonic() - self._start_s
            self._write(f"\r{self._text}: {num_compiled} of {self._num_sources} files, {passed_s:.0f} s")

    def end(self) -> None:
        """End the line."""
        if self._is_terminal:
            self.show()
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _wait(child: "subprocess.Popen[bytes]", progress: CompileProgress) -> int:
    """Returns the exit status; raises RuntimeError after COMPILE_TIMEOUT_S."""
    deadline_s = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                progress.show()
    finally:
        progress.end()
    raise RuntimeError(f"compilation took longer than {COMPILE_TIMEOUT_S:.0f} s")


_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(file: Path) -> None:
    """Appends a digest to a completely written file that no other process sees yet.

    The digest is at the end because the loader of shared libraries ignores bytes after the last section.
    """
    digest = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(digest)


def read_sealed(file: Path) -> bytes | None:
    """Returns the sealed content; None if the file does not exist, is truncated or was altered."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    return content if content and hashlib.sha256(content).digest() == digest else None
