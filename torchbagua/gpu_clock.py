"""When a GPU does what it is told: known once it has done it, without waiting for it."""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchbagua.events import Details, Phase

Moment = int | torch.cuda.Event
"""`time.perf_counter_ns`, or a place in a stream, of which the time is not known before the GPU has come to it."""


class LateValues:
    """Numbers by name that a GPU computes; to be read when it has come to a moment that is taken after this is made."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._names = tuple(values)
        self._on_host = torch.empty(len(values), pin_memory=True)
        self._on_host.copy_(torch.stack([value.float() for value in values.values()]), non_blocking=True)

    def read(self) -> dict[str, float]:
        """Return the numbers."""
        return dict(zip(self._names, self._on_host.tolist(), strict=True))


class GpuClock:
    """Tells the time of events in the streams of one GPU, on the clock of the host.

    Waits for the GPU once, when it is made: the error of all times is that of this one comparison, some 10 us, and what
    the GPU's own clock drifts.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self.now()
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    def now(self) -> torch.cuda.Event:
        """Return where the calling thread's stream stands now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ns(self, moment: Moment) -> int:
        """Return the time of a moment that has come."""
        if isinstance(moment, int):
            return moment
        elapsed_ms: float = self._base.elapsed_time(moment)
        return self._base_ns + round(1e6 * elapsed_ms)

    def move_base(self, moment: torch.cuda.Event) -> None:
        """Measure from this moment on, which has come: CUDA tells milliseconds in float32, exact over short times."""
        self._base_ns, self._base = self.ns(moment), moment


class Ended(NamedTuple):
    """A phase that has ended, or will have when a GPU has come to that, and what it is about.

    Attributes:
        late_values: what is to be read then in place of the details' values.
    """

    phase: Phase
    start: Moment
    end: Moment
    details: Details
    late_values: LateValues | None = None


class StepsOnGpu:
    """What was told of in training steps of which a GPU may not have come to the end.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = GpuClock(device)
        self._steps: deque[tuple[int, list[Ended]]] = deque()

    def add(self, step: int, ended: list[Ended]) -> None:
        """Add what was told of in a step, in which the last ends last of all."""
        self._steps.append((step, ended))

    def take(self, *, waits: bool) -> list[tuple[int, Ended]]:
        """Return, with its step and its times in ns, what the GPU has done of whole steps; waits for all if told to."""
        done = []
        while self._steps and (waits or self._is_done(self._steps[0][1])):
            step, ended = self._steps.popleft()
            for phase, start, end, details, late_values in ended:
                if waits:
                    _wait_for(start)
                    _wait_for(end)
                if late_values is not None:
                    details = details._replace(values=late_values.read())
                done.append((step, Ended(phase, self.clock.ns(start), self.clock.ns(end), details)))
            if ended and not isinstance(last := ended[-1].end, int):
                self.clock.move_base(last)
        return done

    def _is_done(self, ended: list[Ended]) -> bool:
        moments = (moment for one in ended for moment in (one.start, one.end))
        return all(isinstance(moment, int) or moment.query() for moment in moments)


def _wait_for(moment: Moment) -> None:
    if not isinstance(moment, int):
        moment.synchronize()
