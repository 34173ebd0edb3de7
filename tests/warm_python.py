"""Runs Python programs in forks of a process that has imported torch, which takes longer than most programs run.

Use it if a test depends neither on the start of the interpreter nor on what it reads then: LD_LIBRARY_PATH, a
sitecustomize, PYTHONHASHSEED. Each program is nevertheless a separate process, with the environment, the folder and the
`sys.path` that it would have.

Run as a program, this file is the process that forks. It reads requests from stdin, and ends when stdin ends.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import programs

# Modules that programs would import from torch sooner or later: the first DDP imports _dynamo.
_IMPORTED = ("torch", "torch._dynamo")


_processor_s = [0.0, 0.0]


def processor_times() -> tuple[float, float]:
    """Returns the user and system time in seconds of all programs that were waited for."""
    user_s, system_s = _processor_s
    return user_s, system_s


class Fork:
    """A program that was started; after `wait`, none of its processes is left."""

    def __init__(self, pid: int, out: Path) -> None:
        self.pid = pid
        self.out = out
        self._status: int | None = None

    def printed(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")

    def wait_for_line(self, line: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while line not in self.printed().splitlines():
            assert time.monotonic() < deadline_s, f"no line {line!r} after {timeout_s} s:\n{self.printed()}"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Returns its exit status, which is negative for a signal; after `timeout_s` kills it and returns None."""
        if self._status is None:
            server = _server()
            assert server.stdout is not None
            _ask(wait=self.pid)
            is_done, _, _ = select.select([server.stdout], [], [], timeout_s)
            if not is_done:
                os.kill(self.pid, signal.SIGKILL)
            self._status, *_processor_s[:] = json.loads(server.stdout.readline())
            if not is_done:
                return None
        return self._status


@contextlib.contextmanager
def started(
    arguments: Sequence[str | os.PathLike[str]],
    *,
    out: Path,
    err: Path | None = None,
    cwd: str | os.PathLike[str] = ".",
    env: Mapping[str, str] | None = None,
    ends_whole: bool = False,
) -> Iterator[Fork]:
    """Starts `python *arguments`; kills it in the end with all processes that it has started.

    It writes to the new files `out` and `err`, or to `out` alone. With `ends_whole` the interpreter tears its modules
    down, which takes longer.
    """
    mark = programs.new_mark()
    environment = {**(os.environ if env is None else env), programs.MARK: mark}
    files = [os.path.abspath(file) for file in (out, err or out)]
    start = {"arguments": list(map(str, arguments)), "cwd": os.path.abspath(cwd), "env": environment, "files": files}
    _ask(start={**start, "ends_whole": ends_whole})
    server = _server()
    assert server.stdout is not None
    out.touch()
    fork = Fork(int(server.stdout.readline()), out)
    try:
        yield fork
    finally:
        fork.send_signal(signal.SIGKILL)
        fork.wait(20)
        programs.kill_marked(mark)


def run(
    arguments: Sequence[str | os.PathLike[str]], *, timeout_s: float = 120, check: bool = True, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs `python *arguments` to its end, as `programs.run` does; `options` are those of `started`."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "err")
        with started(arguments, out=files[0], err=files[1], **options) as fork:
            status = fork.wait(timeout_s)
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    assert status is not None, f"not done after {timeout_s} s: {arguments}\n{out}\n{err}"
    assert status == 0 or not check, f"ended with {status}: {arguments}\n{out}\n{err}"
    return subprocess.CompletedProcess(list(arguments), status, out, err)


def run_ranks(script: Path, *arguments: str, ranks: int = 2, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs `script` as `programs.forked_ranks` does; `options` are those of `run`."""
    _, *of_launcher = programs.forked_ranks(script, *arguments, ranks=ranks)
    return run(of_launcher, **options)


def _ask(**request: Any) -> None:
    server = _server()
    assert server.stdin is not None
    server.stdin.write(json.dumps(request).encode() + b"\n")


@functools.cache
def _server() -> "subprocess.Popen[bytes]":
    """Returns the process that imports torch. It lives as long as this process."""
    programs.start_reaper()  # ends the running programs if this process is killed
    environment = {**os.environ, programs.MARK: programs.new_mark()}
    pipe = subprocess.PIPE
    # Unbuffered: `select` would not see data that is left in a buffer.
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
    )
    atexit.register(server.communicate)
    return server


def _next_start() -> dict[str, Any] | None:
    """Forks for each request to start a program. Returns it in the fork; in this process None, after the last request.

    Answers with the fork's process number; to a request to wait for it, with its exit status, and the user and system
    time in seconds of all forks that were waited for.
    """
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                start: dict[str, Any] = request["start"]
                return start
            print(pid, flush=True)
        else:
            pid = request["wait"]
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            # Kill the processes that it has forked. Its number is not reused until its status is collected.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            status, times = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.times()
            print(json.dumps([status, times.children_user, times.children_system]), flush=True)
    return None


def _become(start: Mapping[str, Any], own_paths: set[str]) -> None:
    """Turns this process into `python *arguments`, in the state in which programs begin, and runs the program."""
    for descriptor, file in enumerate((os.devnull, *start["files"])):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if pytest ignores it
    os.environ.clear()
    os.environ.update(start["env"])
    os.chdir(start["cwd"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where processes that it spawns look for the script
    del sys.modules["programs"]
    first, *arguments = start["arguments"]
    added = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *added, *(path for path in sys.path if path not in own_paths)]
    if first in ("-c", "-m"):
        target, *arguments = arguments
        sys.argv = [first, *arguments]
        if first == "-m":
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(target, "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *arguments]
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def _end_after(program: Callable[[], None]) -> NoReturn:
    """Runs `program` and its exit handlers, as the interpreter does, and exits with its status."""
    status = 0
    try:
        try:
            program()
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        # No public way to exit skips the teardown of all modules of the first process, which would copy its memory.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    before = {str(Path(__file__).parent), *map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    gc.freeze()  # a fork that collected garbage would copy all of it
    if (start := _next_start()) is not None:
        if start["ends_whole"]:
            _become(start, before)
        else:
            _end_after(lambda: _become(start, before))
