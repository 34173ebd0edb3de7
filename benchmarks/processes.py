"""Starts and monitors the rank processes of a benchmark, and always ends them when the benchmark ends."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

T = TypeVar("T")

POLL_S = 0.1
STALL_S = 120  # longest wait for progress: importing, a first compilation, one block
GRACE_S = 1  # the rank that makes the others fail is not always the first to end
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
PR_SET_PDEATHSIG = 1


class RankFailure(RuntimeError):
    """A rank ended early or stopped making progress."""


class Stopped(Exception):
    """A signal or the deadline ends the benchmark; the message says which."""


class Limits:
    """Determines when to stop: at SIGINT, SIGTERM, SIGHUP or the deadline.

    Signals are only recorded, and checked between two polls, so that they cannot interrupt the creation or deletion of
    a network.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.start = time.monotonic()
        self.signal: signal.Signals | None = None
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def check(self) -> None:
        """Raise Stopped if a signal has arrived or the deadline has passed."""
        if self.signal is not None:
            raise Stopped(self.signal.name)
        if time.monotonic() - self.start > self.deadline_s:
            raise Stopped(f"the deadline of {self.deadline_s:.0f} s (--deadline)")

    def end(self, path: Path, sections: Sequence[object], complaints: Sequence[str]) -> int:
        """Print the file of the results, if there are any, and the complaints; return the exit status."""
        if sections:
            print(f"Results: {path}")
        for complaint in complaints:
            print(complaint, file=sys.stderr)
        return 128 + self.signal if self.signal else int(bool(complaints))


def run_ranks(
    program: str,
    settings: Any,
    scratch: Path,
    limits: Limits,
    title: str,
    *,
    prefixes: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    stall_s: float = STALL_S,
) -> None:
    """Run a program of this folder in a process for each rank, and show the progress until all have ended successfully.

    Args:
        program: calls `begin_rank` and, on rank 0, `report_progress`.
        settings: a dataclass with fields that JSON can represent.
        scratch: folder of the settings, of a log for each rank, and of the files that the ranks write.
        limits: determines when to stop.
        title: title of the progress bar.
        prefixes: the words before Python in each rank's command.
        environment: added to this process's environment.
        stall_s: longest wait for progress.

    Raises:
        RankFailure: a rank ended early, or no rank makes progress.
        Stopped: the limits ended the run.

    In every case, all processes that the ranks have started end with them.
    """
    # Not torch's start_processes: if starting a rank fails, or a signal arrives, it forgets the running ranks.
    (scratch / "settings.json").write_text(json.dumps(asdict(settings)))
    arguments = [sys.executable, str(Path(__file__).with_name(program)), str(scratch / "settings.json")]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, prefix in enumerate(prefixes):
            with open(scratch / f"rank{rank}.log", "wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*prefix, *arguments, str(rank), str(os.getpid())],
                        env=os.environ | environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C only reaches this process, and killpg reaches their children
                    )
                )
        _wait_for_ranks(ranks, scratch, limits, title, stall_s)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_ranks(
    ranks: list[subprocess.Popen[bytes]], scratch: Path, limits: Limits, title: str, stall_s: float
) -> None:
    last_progress = time.monotonic()
    with tqdm(desc=title, unit="step", leave=False) as bar:
        while True:
            _raise_failures(ranks, scratch)
            if all(process.poll() is not None for process in ranks):
                return
            limits.check()
            with contextlib.suppress(FileNotFoundError):  # the file does not exist before the first step
                num_done, bar.total, label = json.loads((scratch / "progress.json").read_text())
                if num_done > bar.n:
                    last_progress = time.monotonic()
                    bar.set_postfix_str(label, refresh=False)
                    bar.update(num_done - bar.n)
            if time.monotonic() - last_progress > stall_s:
                raise RankFailure(f"no step ended for {stall_s:.0f} s; the log of rank 0:\n{_log_tail(scratch, 0)}")
            time.sleep(POLL_S)


def _raise_failures(ranks: list[subprocess.Popen[bytes]], scratch: Path) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
    if failed:
        time.sleep(GRACE_S)
        failed += [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0) and rank not in failed]
        messages = [f"rank {rank} ended with {ranks[rank].returncode}:\n{_log_tail(scratch, rank)}" for rank in failed]
        raise RankFailure("\n".join(messages))


def _log_tail(scratch: Path, rank: int) -> str:
    return (scratch / f"rank{rank}.log").read_text(errors="replace")[-2000:]


def free_port() -> int:
    """Return an unused TCP port of the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def begin_rank(settings: type[T]) -> tuple[T, int]:
    """Return the settings and the rank that `run_ranks` has passed to this process, and limit torch to one thread.

    The kernel ends the rank when its benchmark ends, even by SIGKILL, so that no process keeps a namespace in use.
    """
    path, rank, parent_pid = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        raise SystemExit("the benchmark has ended")
    torch.set_num_threads(1)
    return settings(**json.loads(Path(path).read_text())), int(rank)


def report_progress(scratch: Path, num_done: int, num_planned: int, label: str) -> None:
    """Write the progress that `run_ranks` shows; called by rank 0."""
    progress = scratch / "progress.json"
    written = progress.with_suffix(".new")
    written.write_text(json.dumps([num_done, num_planned, label]))
    written.replace(progress)  # atomic: a reader never sees half a line


def leave_process_group() -> None:
    """Destroy the default group. The caller must hold no reference to a DDP module."""
    # While a DDP references the process group, gloo's threads outlive destroy_process_group. They must not outlive the
    # interpreter: a thread that releases a Python object then aborts the process.
    gc.collect()
    dist.destroy_process_group()
