"""Programs that tests start: each in a session of its own, and nothing of it is left when its block, or pytest, ends.

Run as a program, it waits until the pytest that started it is gone, however that ended, and ends what it has left.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Command = Sequence[str | os.PathLike[str]]

# In the environment of every process that is started, and so in that of all that it starts in turn, whatever sessions
# those make for themselves (torchrun's ranks do). One that runs tests again hands its own mark on in front.
MARK = "TORCHBAGUA_TEST_PROCESSES"
_OURS = f"{os.environ.get(MARK, '')}/{os.getpid()}"
_NUMBERS = itertools.count()


def torchrun(script: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The command that starts `script` in as many processes as `ranks` says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, str(script), *arguments]


def forked_ranks(script: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The same where torchrun itself, and how an interpreter ends, are not what is tested: it takes half as long."""
    return [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), str(ranks), str(script), *arguments]


@contextlib.contextmanager
def started(
    command: Command, *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator["subprocess.Popen[str]"]:
    """A process that SIGINT ends, also where pytest ignores it; killed in the end with all that it has started.

    Args:
        command: the program and its arguments.
        env: in place of this process's environment.
        options: of Popen.
    """
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
    """Runs `command` to its end; what it printed is in the result, and in the failure where it fails or takes too long.

    Args:
        command: the program and its arguments.
        timeout_s: what it may take.
        check: whether another exit status than 0 is a failure.
        options: of `started`.
    """
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
    """The environment in which Ray reports nothing and leaves nothing: neither logs and sockets, nor its key.

    Its folder is not that of the test: sockets lie in it, whose paths must be short.
    """
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def new_mark() -> str:
    """Returns what a process gets as `MARK` in its environment: no other one has it but those that it starts."""
    return f"{_OURS}/{next(_NUMBERS)}/"


def kill_marked(mark: str) -> None:
    """Kills every process whose mark begins with `mark`, and those that they start meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    found, patience_s = sys.platform == "linux", time.monotonic() + 0.2
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                environment = (folder / "environ").read_bytes()
                if any(variable.startswith(wanted) for variable in environment.split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
                elif not environment and (folder / "exe").exists():  # within exec it has none yet
                    found |= time.monotonic() < patience_s
        if found:
            time.sleep(0.002)


@contextlib.contextmanager
def _default_interrupt() -> Iterator[None]:
    """Has processes start with SIGINT's default: exec keeps that a signal is ignored, and not that it is handled."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@functools.cache
def start_reaper() -> None:
    """Starts this file as a program, once; its stdin ends with this process."""
    command = [sys.executable, "-S", __file__, f"{_OURS}/"]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(reaper.communicate)


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked(sys.argv[1])
