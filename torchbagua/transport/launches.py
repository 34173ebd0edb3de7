"""The operations launched in stream order over a private transport that the GPU has not finished."""

import time
from collections import deque
from typing import NamedTuple

import torch

from torchbagua.transport.streams import has_reached


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
