"""The times of phases: on the host known at once, on a GPU known later, without waiting for the GPU."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from torchbagua import _concurrency
from torchbagua.observe.events import TRAINING_PHASES, CommEvent, Details, Phase, Timestamp


class TimedPhase(NamedTuple):
    """A phase that has ended, or that ends when the GPU reaches its end timestamp, and its details.

    Attributes:
        measured: host tensors, complete at `end`; if given, they replace the values of `details`.
    """

    phase: Phase
    start: Timestamp
    end: Timestamp
    details: Details
    measured: Mapping[str, torch.Tensor] | None = None


class TimedStep(NamedTuple):
    """The phases of a training step, or of a part of a step.

    Attributes:
        end: the end of the step; None if more phases of the step follow.
        lane_end: when the lane started its work of the next step; None if it did so at the end of the step.
    """

    number: int
    algorithm: str
    phases: list[TimedPhase]
    end: Timestamp | None
    lane_end: Timestamp | None = None


class Clock(Protocol):
    """Takes timestamps, and converts timed phases into events."""

    def now(self) -> Timestamp:
        """Return the current timestamp."""
        ...

    def fetch(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return values on the host, complete at any timestamp taken after this call."""
        ...

    def resolve(self, step: TimedStep, *, waits: bool) -> list[CommEvent] | None:
        """Return the events of a step, the "step" event last, without phases that end before they begin.

        Steps must be passed in order. Phases of the lane after `lane_end` are stored, and returned with the next step.
        Return None if some times are not known yet, unless `waits` is set: then wait for them.

        Raises RuntimeError if the GPU does not reach one of them in time.
        """
        ...


class HostClock:
    """The clock for work on the host: all timestamps are host times."""

    def __init__(self) -> None:
        self._step_start_ns = 0  # determined by the first phase
        self._lane_start_ns = 0  # when the lane started its work of the current step
        self._early: list[TimedPhase] = []  # phases of the next step

    def now(self) -> int:
        return _concurrency.perf_counter_ns()

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
            if step.number == 0:  # step 0 begins with its first phase
                self._step_start_ns = min(self._step_start_ns or start_ns, start_ns)
            # The lane may report a phase that ended just before the end of the last step after that step was reported.
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
    """The clock for work in the streams of one GPU. All times are on the host's clock, and host times may be mixed in.

    The constructor waits for the GPU once; the current step starts then. The error of all times is the error of this
    one comparison, about 10 us, plus the drift of the GPU's clock.
    """

    def __init__(self, device: torch.device, wait: Callable[[torch.cuda.Event], object]) -> None:
        self._device = device
        self._wait = wait
        self._base = self.now()
        wait(self._base)
        self._base_ns = self._step_start_ns = _concurrency.perf_counter_ns()
        self._early: list[TimedPhase] = []  # phases of the next step

    def now(self) -> torch.cuda.Event:
        """Return the current position in the calling thread's stream."""
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
                self._wait(timestamp)
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
            # Measure from here on: CUDA reports milliseconds in float32, which is exact only over short times.
            self._base_ns, self._base = self._ns(on_gpu[-1]), on_gpu[-1]
        return events

    def _ns(self, timestamp: Timestamp) -> int:
        if isinstance(timestamp, int):
            return timestamp
        elapsed_ms: float = self._base.elapsed_time(timestamp)
        return self._base_ns + round(1e6 * elapsed_ms)


def _is_early(phase: TimedPhase, end_ns: int, lane_end_ns: int | None) -> bool:
    """Return whether the lane ran the phase as part of the next step."""
    return lane_end_ns is not None and end_ns > lane_end_ns and phase.phase not in TRAINING_PHASES


def _event(phase: TimedPhase, start_ns: int, end_ns: int, step: int, algorithm: str) -> CommEvent:
    details = phase.details
    if phase.measured is not None:
        details = details._replace(values={name: value.item() for name, value in phase.measured.items()})
    return CommEvent(phase.phase, start_ns, end_ns, step, algorithm, *details)
