"""Threads, locks, waits, clocks, finalizers and exit handlers of the whole package; a simulation replaces them.

Use them as `_concurrency.Lock()`, and never import them by name: `torchbagua.testing.simulation` sets the attributes of
this module for the duration of a run, so that one thread runs at a time and time is virtual.
"""

import atexit
import queue
import threading
import time
import weakref
from typing import Any

import torch

Thread = threading.Thread
Lock = threading.Lock
Condition = threading.Condition
SimpleQueue = queue.SimpleQueue
monotonic = time.monotonic
perf_counter = time.perf_counter
perf_counter_ns = time.perf_counter_ns
sleep = time.sleep
finalize = weakref.finalize
at_exit = atexit.register
unregister_at_exit = atexit.unregister


def wait_for(future: "torch.futures.Future[Any]") -> None:
    """Wait until `future` is complete, and run signal handlers meanwhile. On a GPU, the current stream waits too."""
    if not future.done():  # its own wait would delay signal handlers until it is complete
        is_pending = threading.Lock()
        is_pending.acquire()
        future.add_done_callback(lambda _: is_pending.release())
        is_pending.acquire()
    future.wait()
