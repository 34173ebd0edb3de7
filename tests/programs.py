"""Programs that tests start: each in a separate session; all its processes end with its block, or with pytest.

Run as a program, this file waits until the pytest that started it ends in any way, and kills the remaining processes.
"""

import atexit
import contextlib
import functools
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Command = Sequence[str | os.PathLike[str]]

# Set in the environment of each started process. Its descendants inherit it, even if they create sessions of their own,
# as torchrun's ranks do. A process that runs tests itself prefixes the marks with its own mark.
MARK = "TORCHBAGUA_TEST_PROCESSES"
_OURS = f"{os.environ.get(MARK, '')}/{os.getpid()}"
_NUMBERS = itertools.count()


def torchrun(script: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Return the command that starts `script` in `ranks` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, str(script), *arguments]


def forked_ranks(script: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Like `torchrun` in half the time, for tests of neither torchrun itself nor the exit of interpreters."""
    return [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), str(ranks), str(script), *arguments]


@contextlib.contextmanager
def started(
    command: Command, *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator["subprocess.Popen[str]"]:
    """Run a process in a block; kill it and its descendants at the end. SIGINT ends it even if pytest ignores it."""
    start_reaper()
    mark = new_mark()
    environment = {**(os.environ if env is None else env), MARK: mark}
    with _default_interrupt():
        process = subprocess.Popen(command, env=environment, start_new_session=True, text=True, **options)
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_marked(mark)


def run(
    command: Command, *, timeout_s: float = 120, check: bool = True, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run `command` to its end. The result contains its output, as does the error if it fails or times out."""
    with started(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            shown = [(stream or b"").decode(errors="replace") for stream in (late.stdout, late.stderr)]
            raise AssertionError("\n".join([f"not done after {timeout_s} s: {command}", *shown])) from None
    assert process.returncode == 0 or not check, f"ended with {process.returncode}: {command}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def ray_files() -> Iterator[dict[str, str]]:
    """Give an environment in which Ray sends no usage reports, and leaves no logs, sockets or key behind.

    Its folder is not the test's, because it contains sockets, and their paths must be short.
    """
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def new_mark() -> str:
    """Return a value of `MARK` for the environment of one process: only it and its descendants have it."""
    return f"{_OURS}/{next(_NUMBERS)}/"


def kill_marked(mark: str) -> None:
    """Kill each process whose mark begins with `mark`, and those that they start meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    found, patience_s = sys.platform == "linux", time.monotonic() + 0.2
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile, or belongs to another user
                environment = (folder / "environ").read_bytes()
                if any(variable.startswith(wanted) for variable in environment.split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
                elif not environment and (folder / "exe").exists():  # during exec the environment is still empty
                    found |= time.monotonic() < patience_s
        if found:
            time.sleep(0.002)


@contextlib.contextmanager
def _default_interrupt() -> Iterator[None]:
    """Start processes with SIGINT's default: exec preserves that a signal is ignored, but not its handler.

    Only the main thread can set it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@functools.cache
def start_reaper() -> None:
    """Start this file as a program, once. Its stdin closes when this process ends."""
    command = [sys.executable, "-S", __file__, f"{_OURS}/"]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(reaper.communicate)


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked(sys.argv[1])
