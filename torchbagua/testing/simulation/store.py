"""The store of a simulation."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from torchbagua.testing.simulation.scheduler import Scheduler

DEFAULT_TIMEOUT = timedelta(seconds=300)


class SimulatedStore(dist.Store):
    """A key-value store that all ranks share. Every request takes a round trip.

    Args:
        scheduler: of the simulation.
        latency_s: of a message to the store, or from it.

    Attributes:
        latency_s: the same; may change.
        starts_at_s: the time before which the store answers no request.
        is_gone: whether its process has died, so that every request fails.
        silent_from: the number of the request from which on it answers nothing, as if its process had been stopped.
        on_silence: called at this request.
    """

    def __init__(self, scheduler: Scheduler, latency_s: float) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.latency_s = latency_s
        self.starts_at_s = 0.0
        self.is_gone = False
        self.silent_from = math.inf
        self.on_silence: Callable[[], None] = lambda: None
        self._num_requests = 0
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._round_trip()
        self._values[key] = as_bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._round_trip()
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._round_trip()
        if self._values.get(key, b"") == as_bytes(expected):
            self._values[key] = as_bytes(desired)
        return self._values.get(key, as_bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        self._round_trip()
        return self._values.keys() >= {*keys}

    def wait(self, keys: Sequence[str], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._round_trip()

        def has_answer() -> bool:
            return self.is_gone or (self._values.keys() >= {*keys} and not self._is_silent)

        is_set = self._scheduler.block(has_answer, timeout.total_seconds())
        self._check()
        if not is_set:
            raise dist.DistStoreError(f"timed out after {timeout.total_seconds():g} s waiting for keys")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._round_trip()
        self._values |= {key: as_bytes(value) for key, value in zip(keys, values, strict=True)}

    def has_extended_api(self) -> bool:
        return True

    @property
    def _is_silent(self) -> bool:
        return self._num_requests >= self.silent_from

    def _round_trip(self) -> None:
        self._num_requests += 1
        if self._num_requests == self.silent_from:
            self.on_silence()
        self._scheduler.block(lambda: False, max(2 * self.latency_s, self.starts_at_s - self._scheduler.now_s))
        self._check()

    def _check(self) -> None:
        if self._is_silent:  # the timeout of a `wait` needs an answer too
            self._scheduler.block(lambda: False)
        if self.is_gone:
            raise dist.DistNetworkError("the store has closed the connection")


def as_bytes(value: str | bytes) -> bytes:
    """Return the bytes of a value, as a store keeps it."""
    return value.encode() if isinstance(value, str) else bytes(value)
