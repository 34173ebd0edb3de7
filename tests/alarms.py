"""Runs a signal handler on the main thread while it waits."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def alarm_after(seconds: float, handler: Callable[[], None]) -> Iterator[None]:
    """Have SIGALRM call `handler` in the block: after `seconds`, or, with 0, when the block itself sets the timer."""
    former = signal.signal(signal.SIGALRM, lambda number, frame: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
