"""What a GPU has been told to communicate over a private transport in stream order, and has not done yet."""

import time
from collections import deque
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """What a stream has been told to do, the mark that it reaches afterwards, and when it was told."""

    purpose: str
    done: torch.cuda.Event
    at_s: float


class Launches:
    """The launches of one transport, in their order. Noted on one thread, and asked for on the same.

    Attributes:
        transport_name: what errors call the transport.
    """

    def __init__(self, transport_name: str) -> None:
        self.transport_name = transport_name
        self._launches: deque[Launch] = deque()

    def note(self, purpose: str, device: torch.device) -> None:
        """Note that the current stream of `device` has been told to do `purpose`."""
        done = torch.cuda.current_stream(device).record_event()
        self._launches.append(Launch(purpose, done, time.monotonic()))

    def under_way(self) -> Launch | None:
        """Return the first that the GPU is not done with. Raises RuntimeError if the GPU has failed."""
        while self._launches and self._launches[0].done.query():
            self._launches.popleft()
        return self._launches[0] if self._launches else None
