"""Traces that write on a thread of their own, so that training does not wait for disks and pictures."""

import atexit
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchbagua.events import CommEvent, Run, Trace, TraceError

# Of a disk that hangs, memory shall not fill with what it has not taken.
_MOST_QUEUED = 1_000
_LONGEST_END_S = 30.0
_HAND_OVER_EVERY_NS = 500_000_000


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


class BackgroundTrace(Trace):
    """Hands the events of some steps, when they have ended, to a writer on a thread of its own.

    Subclasses override `open`. What the writer raises is raised to whoever tells of a later step. The thread ends with
    `on_end`, where nobody calls that with the trace itself, or else with the process.

    Args:
        place: what is written to, in errors.
    """

    def __init__(self, place: object) -> None:
        self._place = place  # that is written to, in errors
        self._worker: _Worker | None = None
        self._handed_over_ns = 0

    def check(self) -> None:
        """Raise ValueError where it has been attached before."""
        if self._worker is not None:
            raise ValueError(f"{type(self).__name__}: a trace serves one attachment; make another one")

    def open(self, run: Run) -> tuple[Callable[[list[CommEvent]], None], Callable[[], None]]:
        """Return what writes the events of whole steps, and at last of what came after these, and what finishes.

        Both are called on the thread, and must not hold the trace.
        """
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        """Open what is written to. Raises TraceError where that cannot be done."""
        self.check()
        with self._explained():
            self._worker = _Worker(f"torchbagua {type(self).__name__}", *self.open(run))
        weakref.finalize(self, self._worker.stop).atexit = False

    def on_comm(self, event: CommEvent) -> None:
        """Keep the event, and hand over those of whole steps now and then: many at once take far less time."""
        if self._worker is None:
            return
        self._worker.pending.append(event)
        if event.phase == "step" and event.end_ns - self._handed_over_ns > _HAND_OVER_EVERY_NS:
            self._handed_over_ns = event.end_ns
            with self._explained():
                self._worker.hand_over()

    def on_end(self) -> None:
        """Write what is left, and close what was opened."""
        if self._worker is not None:
            with self._explained():
                self._worker.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of which a TimeoutError is one
            raise TraceError(f"{str(self._place)!r} cannot be written to: {error}") from error


class _Worker:
    """A thread that hands lists of events to `write`, one after the other, and then calls `finish`.

    What `write` raises ends it, and is raised by the next `hand_over` or `close`.

    Attributes:
        pending: events that are still to be handed over.
    """

    def __init__(self, name: str, write: Callable[[list[CommEvent]], None], finish: Callable[[], None]) -> None:
        self.pending: list[CommEvent] = []
        self._queue: queue.SimpleQueue[list[CommEvent] | None] = queue.SimpleQueue()
        self._write = write
        self._finish = finish
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._finish_at_exit)

    def hand_over(self) -> None:
        """Queue what is pending; raise what earlier events have led to."""
        if self._failure is not None:
            raise self._failure
        if self._queue.qsize() >= _MOST_QUEUED:
            raise TimeoutError(f"what it writes to is so slow that {_MOST_QUEUED} lists of events wait to be written")
        if self.pending:
            self._queue.put(self.pending)
            self.pending = []

    def stop(self) -> None:
        """Let the thread end when it has written what there is; does not wait for that."""
        self._queue.put(self.pending)
        self.pending = []
        self._queue.put(None)

    def close(self) -> None:
        """Wait until all is written; raise what that has led to."""
        self.stop()
        self._thread.join(_LONGEST_END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"what it writes to takes longer than {_LONGEST_END_S:g} s for the rest")
        if self._failure is not None:
            raise self._failure

    def _finish_at_exit(self) -> None:
        self.stop()
        self._thread.join(_LONGEST_END_S)

    def _work(self) -> None:
        try:
            while (events := self._queue.get()) is not None:
                if events:
                    self._write(events)
            self._finish()
        except Exception as error:
            self._failure = error
        finally:
            atexit.unregister(self._finish_at_exit)
