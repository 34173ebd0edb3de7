"""Traces that write on a separate thread, so that training does not wait for disks and pictures."""

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

# Often enough that a killed process loses little, and rarely enough that training is rarely interrupted.
_WRITE_EVERY_S = 0.5
# If the disk hangs, unwritten events must not fill the memory.
_MOST_WAITING = 500_000
_LONGEST_END_S = 30.0


def folder_of(owner: str, argument: str, path: object) -> Path:
    """Return the folder at `path`; create it if it is missing."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{owner}: {argument} must be a path, got {path!r}")
    folder = Path(path)
    try:
        if not str(path):
            raise ValueError("the path is empty")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise ValueError(f"{owner}: {argument} must be a folder to write to, got {str(path)!r}: {error}") from error


class Writer(Protocol):
    """Writes the events of a trace. One thread calls it. It must not reference the trace."""

    def write(self, steps: list[list[CommEvent]]) -> None:
        """Write the events of steps. The last event of each step is the "step" event."""
        ...

    def close(self, events: list[CommEvent]) -> None:
        """Write the events after the last complete step, and finish."""
        ...


class BackgroundTrace(Trace):
    """Writes events on a separate thread, step by step.

    Subclasses override `open`. If the writer raises an error, `on_comm` raises it at the end of a later step. The
    thread ends with `on_end`. If `on_end` is never called, the thread ends when the trace is garbage-collected, or at
    exit.
    """

    def __init__(self, place: object) -> None:
        self._place = place  # the name of the destination in errors
        self._thread: _WriterThread | None = None

    def open(self, run: Run) -> Writer:
        """Return the writer."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError if the trace has been attached before."""
        if self._thread is not None:
            raise ValueError(f"{type(self).__name__}: a trace serves one attachment; create another trace")

    def on_start(self, run: Run) -> None:
        """Open the destination. Raises TraceError if that fails."""
        self.check()
        with self._name_place_in_errors():
            self._thread = _WriterThread(f"torchbagua {type(self).__name__}", self.open(run))
        weakref.finalize(self, self._thread.ending.set).atexit = False

    def on_comm(self, event: CommEvent) -> None:
        """Pass the event to the thread. At the end of a step, raise TraceError if the thread failed to write."""
        if self._thread is not None:
            self._thread.events.append(event)
            if event.phase == "step":
                with self._name_place_in_errors():
                    self._thread.check()

    def on_end(self) -> None:
        """Wait until all events are written. Raises TraceError if writing failed."""
        if self._thread is not None:
            with self._name_place_in_errors():
                self._thread.end()
                self._thread.check()

    @contextmanager
    def _name_place_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # includes TimeoutError
            raise TraceError(f"cannot write to {str(self._place)!r}: {error}") from error


class _WriterThread(threading.Thread):
    """Passes events to a writer in batches, which takes far less time than one by one."""

    def __init__(self, name: str, writer: Writer) -> None:
        super().__init__(name=name, daemon=True)
        self.events: deque[CommEvent] = deque()  # any thread may append
        self.ending = threading.Event()  # no more events will arrive
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
        """Raise the error of the writer, or TimeoutError if the writer is too slow."""
        if self._failure is not None:
            raise self._failure
        if len(self.events) > _MOST_WAITING:
            raise TimeoutError(f"it is so slow that {_MOST_WAITING} events wait to be written")
        if self.ending.is_set() and self.is_alive():
            raise TimeoutError(f"it takes longer than {_LONGEST_END_S:g} s for the last events")

    def end(self) -> None:
        """Wait at most `_LONGEST_END_S` until all events are written."""
        self.ending.set()
        self.join(_LONGEST_END_S)
