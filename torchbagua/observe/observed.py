"""The tracer with observers: it converts the phases of an algorithm's work into events for them."""

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from torchbagua import _concurrency
from torchbagua._environment import environment
from torchbagua._warnings import warn_user_during_error
from torchbagua.observe.events import (
    TRAINING_PHASES,
    CommEvent,
    Details,
    Observer,
    Phase,
    Run,
    Timestamp,
    Trace,
    TraceError,
)
from torchbagua.observe.tracer import NO_SPAN, Span, TracedSpan, Tracer

# Limits the pending phases if no step ends for a long time.
_MOST_PENDING = 5_000

_NO_DETAILS = Details()


class TimedPhase(NamedTuple):
    """A phase that has ended, or that ends when the GPU reaches its end timestamp, and its details."""

    phase: Phase
    start: Timestamp
    end: Timestamp
    details: Details
    measured: Mapping[str, torch.Tensor] | None = None  # on the host, complete at `end`: the values of the details


class TimedStep(NamedTuple):
    """The phases of a training step, or of a part of a step."""

    number: int
    algorithm: str
    phases: list[TimedPhase]
    end: Timestamp | None  # None if more phases of the step follow
    lane_end: Timestamp | None = None  # when the lane started its work of the next step, if before `end`


class ObservedTracer(Tracer):
    """Notifies the observers of one group, or of one algorithm that runs on it, of all phases and their times.

    Work on a GPU is timed by events in its streams, without blocking. Observers are therefore notified of a step only
    after the GPU has reached its end, which is checked at the end of later steps.

    An observer that raises is dropped with a warning, and training continues.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.algorithm = ""  # its class name
        # Without duplicates, even if a group and an attachment over it have the same observer.
        self._observers = tuple({id(observer): observer for observer in observers}.values())
        self.failures: list[str] = []  # the dropped observers, and their errors
        self._unreported: list[tuple[str, int, Exception]] = []
        self._lock = _concurrency.Lock()  # guards the observers: only one thread notifies them at a time
        self._clock = HostClock()
        self._pending: deque[TimedPhase] = deque()  # threads append to it without a lock
        self._unresolved: deque[TimedStep] = deque()
        self._is_started = False  # before the start there are no steps
        self._lane_end: Timestamp | None = None  # of this step, if the lane is ahead of it

    @property
    def is_on(self) -> bool:  # type: ignore[override]
        return bool(self._observers)

    @property
    def compares_clocks(self) -> bool:  # type: ignore[override]
        return any(trace.compares_clocks for trace in self._traces)

    def start(self, run: Run) -> None:
        software = {name: str(value) for name, value in environment().items()}
        run = replace(run, settings={**run.settings, **software})
        self.algorithm = run.algorithm
        self.failures = run.failures
        self._is_started = True
        self._notify_traces(lambda trace: trace.on_start(run))
        self._choose_samples(self.step)

    def use_gpu(
        self,
        device: torch.device,
        wait: Callable[[torch.cuda.Event], object] = lambda event: event.synchronize(),
    ) -> None:
        if self._observers and not isinstance(self._clock, GpuClock):
            self._clock = GpuClock(device, wait)

    def now(self, *, on_host: bool = False) -> Timestamp:
        return _concurrency.perf_counter_ns() if on_host else self._clock.now()

    def end(self) -> None:
        self._deliver()
        self._notify_traces(lambda trace: trace.on_end())
        self._observers = ()

    def span(self, phase: Phase, details: Details = _NO_DETAILS, *, on_host: bool = False) -> Span:
        profiled = super().span(phase, details, on_host=on_host)
        if profiled is not NO_SPAN or not self._observers:
            return profiled
        return TracedSpan(self, phase, details, on_host)

    def tell(self, phase: Phase, start: Timestamp, end: Timestamp, details: Details = _NO_DETAILS) -> None:
        if self._observers:
            self._add(TimedPhase(phase, start, end, details))

    def measure(self, compute: Callable[[], Mapping[str, torch.Tensor]], bucket: str) -> None:
        if not self._observers:
            return
        start = self.now()
        measured = self._clock.fetch(compute())
        self._add(TimedPhase("measure", start, self.now(), Details(bucket=bucket), measured))

    def end_step(self) -> None:
        if not self._observers:
            return
        has_samples = self._deliver(ends_step=True)
        if not has_samples:
            self._choose_samples(self.step)

    def end_step_of_lane(self, step: int) -> None:
        end = self._clock.now()
        with self._lock:
            if step != self.step:
                return
            self._lane_end = end
        self._choose_samples(step + 1)

    def deliver(self) -> None:
        if self._observers:
            self._deliver()

    def _add(self, phase: TimedPhase) -> None:
        self._pending.append(phase)
        if not self._is_started or len(self._pending) >= _MOST_PENDING:
            self._deliver()

    @property
    def _traces(self) -> list[Trace]:
        return [observer for observer in self._observers if isinstance(observer, Trace)]

    def _choose_samples(self, step: int) -> None:
        wanted: list[bool] = []
        self._notify_traces(lambda trace: wanted.append(trace.samples(step)))
        self.samples = any(wanted)

    def _deliver(self, *, ends_step: bool = False) -> bool:
        """Report the phases that have ended, in one batch, which takes a fraction of the time.

        Returns whether the lane has already started the next step.
        """
        lost = ""
        with self._lock:
            num_ended = len(self._pending)  # counted before the step ends: none of these ends after it
            end = self._clock.now() if ends_step else None
            phases = [self._pending.popleft() for _ in range(num_ended)]
            lane_end = self._lane_end
            self._unresolved.append(TimedStep(self.step, self.algorithm, phases, end, lane_end))
            while self._unresolved:
                try:
                    events = self._clock.resolve(self._unresolved[0], waits=not ends_step)
                except RuntimeError as error:  # the GPU waits for a rank that has died
                    lost = f"torchbagua: the events since step {self._unresolved[0].number} are lost: {error}"
                    self._unresolved.clear()
                    break
                if events is None:
                    break
                self._unresolved.popleft()
                self._notify(events)
            if ends_step:
                self.step += 1
                self._lane_end = None
        self._report_failures()
        if lost:
            warn_user_during_error(lost)
        return lane_end is not None

    def _notify(self, events: Sequence[CommEvent]) -> None:
        for observer in self._observers:
            try:
                for event in events:
                    observer.on_comm(event)
            except Exception as error:
                self._drop(observer, error)

    def _notify_traces(self, call: Callable[[Trace], None]) -> None:
        with self._lock:
            for trace in self._traces:
                try:
                    call(trace)
                except Exception as error:
                    self._drop(trace, error)
        self._report_failures()

    def _drop(self, observer: Observer, error: Exception) -> None:
        self._observers = tuple(other for other in self._observers if other is not observer)
        self._unreported.append((type(observer).__name__, self.step, error))

    def _report_failures(self) -> None:
        """Warn of dropped observers, without the lock, since a warning may run arbitrary user code."""
        with self._lock:
            unreported, self._unreported = self._unreported, []
        for name, step, error in unreported:
            is_complete = isinstance(error, TraceError)
            self.failures.append(
                f"{name} stopped in step {step}: {'' if is_complete else f'{type(error).__name__}: '}{error}"
            )
            message = (
                f"torchbagua: the observer {name} failed in step {step} and gets no more events; training continues\n"
                f"{error if is_complete else ''.join(traceback.format_exception(error))}"
            )
            warn_user_during_error(message)  # no observer may stop training


class HostClock:
    """The clock for work on the host: it takes timestamps, and converts timed phases into events."""

    def __init__(self) -> None:
        self._step_start_ns = 0  # determined by the first phase
        self._lane_start_ns = 0  # when the lane started its work of the current step
        self._early: list[TimedPhase] = []  # phases of the next step

    def now(self) -> Timestamp:
        return _concurrency.perf_counter_ns()

    def fetch(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return values on the host, complete at any timestamp taken after this call."""
        return values

    def resolve(self, step: TimedStep, *, waits: bool) -> list[CommEvent] | None:
        """Return the events of a step, the "step" event last, without phases that end before they begin.

        Steps must be passed in order. Phases of the lane after `lane_end` are stored, and returned with the next step.
        Return None if some times are not known yet, unless `waits` is set: then wait for them; RuntimeError if the GPU
        does not reach one of them in time.
        """
        events = []
        lane_end_ns = None if step.lane_end is None else self._ns(step.lane_end)
        phases, self._early = [*self._early, *step.phases], []
        for phase in phases:
            start_ns, end_ns = self._ns(phase.start), self._ns(phase.end)
            is_of_lane = phase.phase not in TRAINING_PHASES
            if is_of_lane and lane_end_ns is not None and end_ns > lane_end_ns:
                self._early.append(phase._replace(start=start_ns, end=end_ns))
                continue
            number = self._number_of(step.number, start_ns, end_ns, is_of_lane)
            if start_ns <= end_ns:
                details = phase.details
                if phase.measured is not None:
                    details = details._replace(values={name: value.item() for name, value in phase.measured.items()})
                events.append(CommEvent(phase.phase, start_ns, end_ns, number, step.algorithm, *details))
        if step.end is not None:
            end_ns = self._ns(step.end)
            events.append(CommEvent("step", self._step_start_ns or end_ns, end_ns, step.number, step.algorithm))
            self._step_start_ns = end_ns
            self._lane_start_ns = end_ns if lane_end_ns is None else lane_end_ns
        return events

    def _ns(self, timestamp: Timestamp) -> int:
        assert isinstance(timestamp, int)
        return timestamp

    def _number_of(self, step: int, start_ns: int, end_ns: int, is_of_lane: bool) -> int:
        if step == 0:  # step 0 begins with its first phase
            self._step_start_ns = min(self._step_start_ns or start_ns, start_ns)
        # The lane may report a phase that ended just before the end of the last step after that step was reported.
        return step - (end_ns < (self._lane_start_ns if is_of_lane else self._step_start_ns))


class GpuClock(HostClock):
    """The clock for work in the streams of one GPU. All times are on the host's clock, and host times may be mixed in.

    The constructor waits for the GPU once; the current step starts then. The error of all times is the error of this
    one comparison, about 10 us, plus the drift of the GPU's clock.
    """

    def __init__(self, device: torch.device, wait: Callable[[torch.cuda.Event], object]) -> None:
        super().__init__()
        self._device = device
        self._wait = wait
        self._base = self.now()
        wait(self._base)
        self._base_ns = self._step_start_ns = _concurrency.perf_counter_ns()

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
        events = super().resolve(step, waits=waits)
        if on_gpu:
            # Measure from here on: CUDA reports milliseconds in float32, which is exact only over short times.
            self._base_ns, self._base = self._ns(on_gpu[-1]), on_gpu[-1]
        return events

    def _ns(self, timestamp: Timestamp) -> int:
        if isinstance(timestamp, int):
            return timestamp
        elapsed_ms: float = self._base.elapsed_time(timestamp)
        return self._base_ns + round(1e6 * elapsed_ms)

    def _number_of(self, step: int, start_ns: int, end_ns: int, is_of_lane: bool) -> int:
        return step
