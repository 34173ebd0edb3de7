"""The stream of a lane: a CUDA stream beside the training stream, or the current stream of its thread."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

# The wait for a GPU is this much longer than it need be at most, and as short as the scheduler of the host can.
_OVERSHOOT = 0.1
_LONGEST_SLEEP_S = 0.01

_HIGH_PRIORITY = -1  # torch has two, and 0 is that of all others


def wait_on_host(mark: torch.cuda.Event, timeout_s: float) -> None:
    """Wait until the GPU has reached `mark`. Raises TimeoutError.

    CUDA's own wait has no end if the GPU waits for another rank that never comes.
    """
    start_s = time.monotonic()
    while not mark.query():
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise TimeoutError(f"the GPU has not come to it within {timeout_s:g} s")
        time.sleep(min(_OVERSHOOT * waited_s, _LONGEST_SLEEP_S))


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of `tensor` until its device's current stream is done with it. Does nothing on the CPU."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class LaneStream(Protocol):
    """The stream of an accelerator on which the jobs of a lane run.

    Attributes:
        device: the accelerator.
        token: a tensor there: a future records an event for the devices of the tensors that it is completed with, and
            for no other.
    """

    device: torch.device
    token: torch.Tensor

    def bind_thread(self) -> None:
        """Make this accelerator the current one of the calling thread."""
        ...

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future of tensors there: the stream of its waiter waits for the work before its completion."""
        ...

    def mark(self) -> Any:
        """Return the current place of the calling thread's stream."""
        ...

    def join(self) -> None:
        """Have the calling thread's stream wait for all work on this one."""
        ...

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Run the work of this context, on any thread, on this stream, after the work before `mark`."""
        ...


class SideStream:
    """A CUDA stream beside the training stream: a `LaneStream`. Streams wait for each other, and the host for none.

    Memory that is allocated on it, as scratch is, is used on it alone. A tensor of another stream that it works on must
    live until its owner has waited for the result.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Other ranks wait for its work, which takes few of the GPU's processors.
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self.token = torch.empty(1, device=device)

    def bind_thread(self) -> None:
        # A thread begins on the first GPU, and a return to it, as at a block's end, would open a context there.
        torch.cuda.set_device(self.device)

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        return torch.futures.Future(devices=[self.device])

    def mark(self) -> torch.cuda.Event:
        mark: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return mark

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield


class ThreadStream:
    """The current stream of the calling thread, on which a backend without CUDA communicates: a `LaneStream`.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.token = torch.empty(1, device=device)

    def bind_thread(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def new_future(self) -> "torch.futures.Future[torch.Tensor]":
        return torch.futures.Future(devices=[self.device])

    def mark(self) -> Any:
        return torch.accelerator.current_stream(self.device).record_event()

    def join(self) -> None:
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        torch.accelerator.current_stream(self.device).wait_event(mark)
        yield


class StreamHandoff:
    """Hands tensors over between two threads: what follows one's `wait` comes after what led to the other's `record`.

    Args:
        device: where the tensors are; on the CPU there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Have the calling thread's stream wait for what the last `record` came after."""
        if self._mark is not None:
            torch.cuda.current_stream(self._device).wait_event(self._mark)

    def record(self) -> None:
        """Note where the calling thread's stream stands, after all that was recorded before."""
        if self._device.type == "cuda":
            self.wait()
            self._mark = torch.cuda.current_stream(self._device).record_event()
