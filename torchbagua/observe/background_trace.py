"""Traces that write on a thread of their own, so that training does not wait for disks and pictures."""

import atexit
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torchbagua.observe.events import CommEvent, Run, Trace, TraceError

# Often enough that a process that is killed loses little, and seldom enough that training is seldom interrupted.
_WRITE_EVERY_S = 0.5
# Of a disk that hangs, memory shall not fill with what it has not taken.
_MOST_WAITING = 500_000
_LONGEST_END_S = 30.0


def folder_of(owner: str, argument: str, path: object) -> Path:
    """Return the folder at `path`, which is made where it is missing.

    Raises:
        TypeError, ValueError: it is no path, or no folder that can be written to; names `owner` and `argument`.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{owner}: {argument} must be a path, got {path!r}")
    folder = Path(path)
    try:
        if not str(path):
            raise ValueError("it is empty")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise ValueError(f"{owner}: {argument} must be a folder to write to, got {str(path)!r}: {error}") from error


class Writer(Protocol):
    """What a trace writes with. It is called on one thread, and must not hold the trace."""

    def write(self, steps: list[list[CommEvent]]) -> None:
        """Write the events of some steps, of each of which the last is the step's own."""
        ...

    def close(self, events: list[CommEvent]) -> None:
        """Write those that came after the last whole step, and finish."""
        ...


class BackgroundTrace(Trace):
    """Has events written on a thread of its own, step by step.

    Subclasses override `open`. What the writer raises is raised to whoever tells of a later step. The thread ends with
    `on_end`; where nobody calls that, with the trace itself or else with the process.

    Args:
        place: what is written to, in errors.
    """

    def __init__(self, place: object) -> None:
        self._place = place
        self._thread: _WriterThread | None = None

    def open(self, run: Run) -> Writer:
        """Return what writes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError where it has been attached before."""
        if self._thread is not None:
            raise ValueError(f"{type(self).__name__}: a trace serves one attachment; make another one")

    def on_start(self, run: Run) -> None:
        """Open what is written to. Raises TraceError where that cannot be done."""
        self.check()
        with self._explained():
            self._thread = _WriterThread(f"torchbagua {type(self).__name__}", self.open(run))
        weakref.finalize(self, self._thread.ending.set).atexit = False

    def on_comm(self, event: CommEvent) -> None:
        """Leave the event to the thread. Raises TraceError at the end of a step where it could not write."""
        if self._thread is not None:
            self._thread.events.append(event)
            if event.phase == "step":
                with self._explained():
                    self._thread.check()

    def on_end(self) -> None:
        """Wait until all is written. Raises TraceError where it could not be."""
        if self._thread is not None:
            with self._explained():
                self._thread.end()
                self._thread.check()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of which a TimeoutError is one
            raise TraceError(f"{str(self._place)!r} cannot be written to: {error}") from error


class _WriterThread(threading.Thread):
    """Hands events to a writer now and then: many at once take far less time.

    Attributes:
        events: that are to be written; any thread appends.
        ending: set where no more will come.
    """

    def __init__(self, name: str, writer: Writer) -> None:
        super().__init__(name=name, daemon=True)
        self.events: deque[CommEvent] = deque()
        self.ending = threading.Event()
        self._writer = writer
        self._failure: Exception | None = None
        self.start()
        atexit.register(self.end)

    def run(self) -> None:
        try:
            step: list[CommEvent] = []
            is_ending = False
            while not is_ending:
                is_ending = self.ending.wait(_WRITE_EVERY_S)
                steps = []
                for _ in range(len(self.events)):
                    step.append(event := self.events.popleft())
                    if event.phase == "step":
                        steps.append(step)
                        step = []
                if steps:
                    self._writer.write(steps)
            self._writer.close(step)
        except Exception as error:
            self._failure = error
        finally:
            atexit.unregister(self.end)

    def check(self) -> None:
        """Raise what writing has led to."""
        if self._failure is not None:
            raise self._failure
        if len(self.events) > _MOST_WAITING:
            raise TimeoutError(f"what it writes to is so slow that {_MOST_WAITING} events wait to be written")
        if self.ending.is_set() and self.is_alive():
            raise TimeoutError(f"what it writes to takes longer than {_LONGEST_END_S:g} s for the rest")

    def end(self) -> None:
        """Wait, for so long at most, until all is written."""
        self.ending.set()
        self.join(_LONGEST_END_S)
