"""A thread on which a trace writes, so that training does not wait for disks and pictures."""

import atexit
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


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


class WriterThread(Generic[T]):
    """Hands items to `write`, one after the other, on a daemon thread; ends with `close`, or with the process.

    Args:
        name: of the thread.
        write: called with each item. Where it raises it is not called again.
        finish: called after the last item, unless `write` has raised.
    """

    def __init__(self, name: str, write: Callable[[T], None], finish: Callable[[], None]) -> None:
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._write = write
        self._finish = finish
        self._failure: Exception | None = None
        self._is_closed = False
        self._close_at_exit = partial(_close_quietly, weakref.ref(self))
        atexit.register(self._close_at_exit)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue `item`, or raise what an earlier one has led to."""
        if self._failure is not None:
            raise self._failure
        self._items.put(item)

    def close(self) -> None:
        """Wait until all is written. May be called again.

        Raises:
            Exception: whatever writing has raised, once.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        self._items.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                self._write(item)
            self._finish()
        except Exception as error:
            self._failure = error


def _close_quietly(thread: "weakref.ref[WriterThread[T]]") -> None:
    if (alive := thread()) is not None:
        alive.close()
