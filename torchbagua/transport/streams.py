"""The stream of a lane: a CUDA stream alongside the training stream, or the current stream of the lane's thread."""

import ctypes
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

# The wait for a GPU overshoots by at most this fraction, and sleeps no shorter than the host's scheduler can.
_OVERSHOOT = 0.1
_LONGEST_SLEEP_S = 0.01

_HIGH_PRIORITY = -1  # torch has two priorities; all other streams have 0

_THREAD_LOCAL_CAPTURE = 1  # cudaStreamCaptureModeThreadLocal, and CUDA's driver has the same number


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """Return CUDA's function, which torch does not expose, from the runtime that torch has loaded, or the driver."""
    functions = {None: "cudaThreadExchangeStreamCaptureMode", "libcuda.so.1": "cuThreadExchangeStreamCaptureMode"}
    for library, name in functions.items():
        try:
            function: Callable[[Any], int] = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        return function
    return None


def tolerate_captures() -> None:
    """Allow this thread to query events and allocate memory while another thread captures a CUDA graph.

    By default, CUDA forbids this to all threads, and such a call also invalidates the capture.
    """
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURE)))


def has_reached(mark: torch.cuda.Event) -> bool:
    """Return whether the GPU has reached `mark`; False while a capture of a CUDA graph forbids to ask."""
    try:
        return bool(mark.query())
    except RuntimeError as error:
        if "stream is capturing" in str(error):
            return False
        raise


def wait_on_host(
    mark: torch.cuda.Event, timeout_s: float = math.inf, check: Callable[[], object] = lambda: None
) -> None:
    """Wait until the GPU has reached `mark`. Call `check` repeatedly, which may raise.

    Raises TimeoutError after `timeout_s`.

    CUDA's own wait never returns if the GPU waits for a rank that never arrives.
    """
    start_s = time.monotonic()
    while not has_reached(mark):
        check()
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise TimeoutError(f"the GPU did not finish within {timeout_s:g} s")
        time.sleep(min(_OVERSHOOT * waited_s, _LONGEST_SLEEP_S))


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Reserve the memory of `tensor` until its device's current stream is done with it. Does nothing on the CPU."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class LaneStream(Protocol):
    """The stream of an accelerator on which the jobs of a lane run.

    Attributes:
        device: the accelerator.
        token: a tensor on `device`, with which futures are completed: a future records events only for the devices of
            its value's tensors.
    """

    device: torch.device
    token: torch.Tensor

    def bind_thread(self) -> None:
        """Make this accelerator the current one of the calling thread."""
        ...

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future of tensors on `device`; the waiter's stream waits for the work before its completion."""
        ...

    def mark(self) -> Any:
        """Return the current position in the calling thread's stream."""
        ...

    def end(self) -> Any:
        """Return the current position in this stream."""
        ...

    def join(self) -> None:
        """Make the calling thread's stream wait for all work on this stream."""
        ...

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Run this context's work on this stream, on any thread, after the work before `mark`."""
        ...


class SideStream:
    """A `LaneStream` alongside the training stream. Streams wait for each other without blocking the host.

    Memory allocated on this stream, such as scratch, is used on this stream only. If the stream works on a tensor of
    another stream, this tensor must live until its owner has waited for the result.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # High priority: other ranks wait for this stream's work, which occupies few of the GPU's multiprocessors.
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self.token = torch.empty(1, device=device)

    def bind_thread(self) -> None:
        # A thread starts on the first GPU. Switching back to it, as at the end of a `with`, would open a context there.
        torch.cuda.set_device(self.device)
        tolerate_captures()

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        return torch.futures.Future(devices=[self.device])

    def mark(self) -> torch.cuda.Event:
        mark: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return mark

    def end(self) -> torch.cuda.Event:
        end: torch.cuda.Event = self._stream.record_event()
        return end

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield


class ThreadStream:
    """The current stream of the calling thread, on which a backend without CUDA communicates: a `LaneStream`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.token = torch.empty(1, device=device)

    def bind_thread(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        return torch.futures.Future(devices=[self.device])

    def mark(self) -> Any:
        return torch.accelerator.current_stream(self.device).record_event()

    def end(self) -> Any:
        return self.mark()

    def join(self) -> None:
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        torch.accelerator.current_stream(self.device).wait_event(mark)
        yield


class StreamHandoff:
    """Passes tensors between two threads: work after one's `wait` follows the work before the other's `record`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the calling thread's stream wait for the work before the last `record`."""
        if self._mark is not None:
            torch.cuda.current_stream(self._device).wait_event(self._mark)

    def record(self) -> None:
        """Record the position of the calling thread's stream, after all positions recorded before."""
        if self._device.type == "cuda":
            self.wait()
            self._mark = torch.cuda.current_stream(self._device).record_event()


class Launch(NamedTuple):
    """The purpose of an operation, an event that its stream records after it, and the time of its launch."""

    purpose: str
    done: torch.cuda.Event
    at_s: float


class Launches:
    """The launches of one transport, in launch order. One thread both records and queries them.

    Attributes:
        transport_name: the transport's name in errors.
    """

    def __init__(self, transport_name: str) -> None:
        self.transport_name = transport_name
        self._launches: deque[Launch] = deque()

    def note(self, purpose: str, device: torch.device) -> None:
        """Record that `purpose` was launched on the current stream of `device`."""
        done = torch.cuda.current_stream(device).record_event()
        self._launches.append(Launch(purpose, done, time.monotonic()))

    def first_unfinished(self) -> Launch | None:
        """Return the first launch that the GPU has not finished. Raises RuntimeError if the GPU has failed."""
        while self._launches and has_reached(self._launches[0].done):
            self._launches.popleft()
        return self._launches[0] if self._launches else None
