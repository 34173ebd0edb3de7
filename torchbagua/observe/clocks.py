"""When phases began and ended: on the host known at once, on a GPU when it has come to that, without waiting for it."""

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from torchbagua.observe.events import TRAINING_PHASES, CommEvent, Details, Phase

Timestamp = int | torch.cuda.Event
"""`time.perf_counter_ns`, or a place in a stream, of which the time is not known before the GPU has come to it."""


class TimedPhase(NamedTuple):
    """A phase that has ended, or will have when a GPU has come to that, and what it is about.

    Attributes:
        measured: on the host, complete by the end; the details' values where it is given.
    """

    phase: Phase
    start: Timestamp
    end: Timestamp
    details: Details
    measured: Mapping[str, torch.Tensor] | None = None


class TimedStep(NamedTuple):
    """What was told of in a training step, or in a part of one.

    Attributes:
        end: of the step; None where more of it is to come.
        lane_end: when the lane began what is part of the next step; None where the step's end divides them.
    """

    number: int
    algorithm: str
    phases: list[TimedPhase]
    end: Timestamp | None
    lane_end: Timestamp | None = None


class Clock(Protocol):
    """Gives timestamps, and makes events of what lies between two of them."""

    def now(self) -> Timestamp:
        """Return this moment."""
        ...

    def fetch(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return values on the host, complete at a timestamp that is taken after this."""
        ...

    def resolve(self, step: TimedStep, *, waits: bool) -> list[CommEvent] | None:
        """Return the events of a step, its own last of all, without phases that end before they begin.

        Steps come in order. Phases of the lane after `lane_end` are kept, and are among the events of the next step.
        None where times are not known yet, for which it waits if it is told to.
        """
        ...


class HostClock:
    """For what the host does: all timestamps are its own."""

    def __init__(self) -> None:
        self._step_start_ns = 0  # found with the first phase
        self._lane_start_ns = 0  # when the lane began what is part of the step
        self._early: list[TimedPhase] = []  # part of the next step

    def now(self) -> int:
        return time.perf_counter_ns()

    def fetch(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return values

    def resolve(self, step: TimedStep, *, waits: bool) -> list[CommEvent] | None:
        events = []
        lane_end_ns = step.lane_end
        assert lane_end_ns is None or isinstance(lane_end_ns, int)
        phases, self._early = [*self._early, *step.phases], []
        for phase in phases:
            start_ns, end_ns = phase.start, phase.end
            assert isinstance(start_ns, int)
            assert isinstance(end_ns, int)
            if _is_early(phase, end_ns, lane_end_ns):
                self._early.append(phase)
                continue
            if step.number == 0:  # which begins with the first phase in it
                self._step_start_ns = min(self._step_start_ns or start_ns, start_ns)
            # The lane may come with what has ended a moment before the step did when that has been told of.
            begin_ns = self._step_start_ns if phase.phase in TRAINING_PHASES else self._lane_start_ns
            number = step.number - (end_ns < begin_ns)
            if start_ns <= end_ns:
                events.append(_event(phase, start_ns, end_ns, number, step.algorithm))
        if step.end is not None:
            assert isinstance(step.end, int)
            events.append(CommEvent("step", self._step_start_ns or step.end, step.end, step.number, step.algorithm))
            self._step_start_ns = step.end
            self._lane_start_ns = step.end if lane_end_ns is None else lane_end_ns
        return events


class GpuClock:
    """For what is done in the streams of one GPU; its times are on the host's clock, from which others may come too.

    Waits for the GPU once, when it is made, which is when the step under way begins. The error of all times is that of
    this one comparison, some 10 us, and what the GPU's own clock drifts.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self.now()
        self._base.synchronize()
        self._base_ns = self._step_start_ns = time.perf_counter_ns()
        self._early: list[TimedPhase] = []  # part of the next step

    def now(self) -> torch.cuda.Event:
        """Return where the calling thread's stream stands now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def fetch(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        on_host = torch.empty(len(values), pin_memory=True)
        on_host.copy_(torch.stack([value.float() for value in values.values()]), non_blocking=True)
        return dict(zip(values, on_host.unbind(), strict=True))

    def resolve(self, step: TimedStep, *, waits: bool) -> list[CommEvent] | None:
        timestamps = [timestamp for phase in step.phases for timestamp in (phase.start, phase.end)]
        timestamps += [timestamp for timestamp in (step.lane_end, step.end) if timestamp is not None]
        on_gpu = [timestamp for timestamp in timestamps if not isinstance(timestamp, int)]
        if waits:
            for timestamp in on_gpu:
                timestamp.synchronize()
        elif not all(timestamp.query() for timestamp in on_gpu):
            return None
        events = []
        lane_end_ns = None if step.lane_end is None else self._ns(step.lane_end)
        phases, self._early = [*self._early, *step.phases], []
        for phase in phases:
            start_ns, end_ns = self._ns(phase.start), self._ns(phase.end)
            if _is_early(phase, end_ns, lane_end_ns):
                self._early.append(phase._replace(start=start_ns, end=end_ns))
            elif start_ns <= end_ns:
                events.append(_event(phase, start_ns, end_ns, step.number, step.algorithm))
        if step.end is not None:
            end_ns = self._ns(step.end)
            events.append(CommEvent("step", self._step_start_ns, end_ns, step.number, step.algorithm))
            self._step_start_ns = end_ns
        if on_gpu:
            # Measured from here on: CUDA tells milliseconds in float32, exact over short times.
            self._base_ns, self._base = self._ns(on_gpu[-1]), on_gpu[-1]
        return events

    def _ns(self, timestamp: Timestamp) -> int:
        if isinstance(timestamp, int):
            return timestamp
        elapsed_ms: float = self._base.elapsed_time(timestamp)
        return self._base_ns + round(1e6 * elapsed_ms)


def _is_early(phase: TimedPhase, end_ns: int, lane_end_ns: int | None) -> bool:
    """Return whether the lane did it beside the next step."""
    return lane_end_ns is not None and end_ns > lane_end_ns and phase.phase not in TRAINING_PHASES


def _event(phase: TimedPhase, start_ns: int, end_ns: int, step: int, algorithm: str) -> CommEvent:
    details = phase.details
    if phase.measured is not None:
        details = details._replace(values={name: value.item() for name, value in phase.measured.items()})
    return CommEvent(phase.phase, start_ns, end_ns, step, algorithm, *details)
