"""Traces that write on a thread of their own, so that training does not wait for disks and pictures."""

import atexit
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchbagua.events import CommEvent, Run


def folder_of(owner: str, argument: str, path: object) -> Path:
    """Return the folder at `path`, which is made where it is missing.

    Raises:
        TypeError, ValueError: it is no path, or no folder that can be written to; names `owner` and `argument`.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{owner}: {argument} must be a path, got {path!r}")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(f"{owner}: {argument} must be a folder to write to, got {str(folder)!r}: {error}") from error


class BackgroundTrace:
    """An observer that hands the events of each step, when it has ended, to a writer on a thread of its own.

    Subclasses override `open`. What the writer raises is raised to whoever tells of the next step.
    """

    def __init__(self) -> None:
        self._thread: _WriterThread | None = None
        self._pending: list[CommEvent] = []

    def open(self, run: Run) -> tuple[Callable[[list[CommEvent]], None], Callable[[], None]]:
        """Return what writes the events up to the end of a step, and what finishes; both are called on the thread."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        """Open what is written to. Raises ValueError where that has been done before."""
        name = type(self).__name__
        if self._thread is not None:
            raise ValueError(f"{name}: a trace serves one attachment; make another one")
        self._thread = _WriterThread(f"torchbagua {name}", *self.open(run))

    def on_comm(self, event: CommEvent) -> None:
        """Keep the event, and hand over those of a step when it has ended."""
        self._pending.append(event)
        if event.phase == "step":
            self._hand_over()

    def on_end(self) -> None:
        """Write what is left, and close what was opened."""
        self._hand_over()
        if self._thread is not None:
            self._thread.close()

    def _hand_over(self) -> None:
        if self._thread is not None and self._pending:
            self._thread.put(self._pending)
            self._pending = []


class _WriterThread:
    """Hands lists of events to `write`, one after the other; ends with `close`, or with the process.

    Args:
        name: of the thread.
        write: called with each list. Where it raises it is not called again.
        finish: called after the last one, unless `write` has raised.
    """

    def __init__(self, name: str, write: Callable[[list[CommEvent]], None], finish: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[list[CommEvent] | None] = queue.SimpleQueue()
        self._write = write
        self._finish = finish
        self._failure: Exception | None = None
        self._is_closed = False
        self._close_at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._close_at_exit)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, events: list[CommEvent]) -> None:
        """Queue events, or raise what earlier ones have led to."""
        if self._failure is not None:
            self.close()
        self._queue.put(events)

    def close(self) -> None:
        """Wait until all is written; raise what writing has led to, once."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while (events := self._queue.get()) is not None:
                self._write(events)
            self._finish()
        except Exception as error:
            self._failure = error


def _close(thread: "weakref.ref[_WriterThread]") -> None:
    if (alive := thread()) is not None:
        alive.close()
