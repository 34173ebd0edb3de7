"""The tracer with observers: it converts the phases of an algorithm's work into events for them."""

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from torchbagua import _concurrency
from torchbagua._environment import environment
from torchbagua._warnings import warn_user_during_error
from torchbagua.observe.clocks import Clock, GpuClock, HostClock, TimedPhase, TimedStep
from torchbagua.observe.events import CommEvent, Details, Observer, Phase, Run, Timestamp, Trace, TraceError
from torchbagua.observe.tracer import NO_SPAN, Span, TracedSpan, Tracer

# Limits the pending phases if no step ends for a long time.
_MOST_PENDING = 5_000

_NO_DETAILS = Details()


class ObservedTracer(Tracer):
    """Notifies the observers of one group, or of one algorithm that runs on it, of all phases and their times.

    Work on a GPU is timed by events in its streams, without blocking. Observers are therefore notified of a step only
    after the GPU has reached its end, which is checked at the end of later steps.

    An observer that raises is dropped with a warning, and training continues.

    Args:
        observers: are notified of every phase.

    Attributes:
        algorithm: the class name of the algorithm.
        failures: the dropped observers, and their errors.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.algorithm = ""
        # Without duplicates, even if a group and an attachment over it have the same observer.
        self._observers = tuple({id(observer): observer for observer in observers}.values())
        self.failures: list[str] = []
        self._unreported: list[tuple[str, int, Exception]] = []
        self._lock = _concurrency.Lock()  # guards the observers: only one thread notifies them at a time
        self._clock: Clock = HostClock()
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
        """Notify observers of the run. Adds the machine and the software to the run's settings."""
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
        """Time work on this GPU from now on. Every call must pass the same GPU.

        Args:
            device: the GPU.
            wait: waits until the GPU has reached an event; raises RuntimeError if this takes too long.
        """
        if self._observers and not isinstance(self._clock, GpuClock):
            self._clock = GpuClock(device, wait)

    def now(self, *, on_host: bool = False) -> Timestamp:
        """Return the current timestamp: of the GPU's current stream if a GPU is used and `on_host` is not set."""
        return _concurrency.perf_counter_ns() if on_host else self._clock.now()

    def end(self) -> None:
        """Report the remaining phases and the end of the run to the observers, and release them."""
        self._deliver()
        self._notify_traces(lambda trace: trace.on_end())
        self._observers = ()

    def span(self, phase: Phase, details: Details = _NO_DETAILS, *, on_host: bool = False) -> Span:
        profiled = super().span(phase, details, on_host=on_host)
        if profiled is not NO_SPAN or not self._observers:
            return profiled
        return TracedSpan(self, phase, details, on_host)

    def tell(self, phase: Phase, start: Timestamp, end: Timestamp, details: Details = _NO_DETAILS) -> None:
        """Report a phase to observers at the end of the step, unless the phase ended before it began."""
        if self._observers:
            self._add(TimedPhase(phase, start, end, details))

    def measure(self, compute: Callable[[], Mapping[str, torch.Tensor]], bucket: str) -> None:
        """Report to observers the values, by name, that `compute` returns, with its duration as a phase."""
        if not self._observers:
            return
        start = self.now()
        measured = self._clock.fetch(compute())
        self._add(TimedPhase("measure", start, self.now(), Details(bucket=bucket), measured))

    def end_step(self) -> None:
        """Report the training step that has ended to observers, and start the next one."""
        if not self._observers:
            return
        has_samples = self._deliver(ends_step=True)
        if not has_samples:
            self._choose_samples(self.step)

    def end_step_of_lane(self, step: int) -> None:
        """Count all further work of the lane towards the step after `step`. The lane's thread calls it.

        If that step has already begun, this has no effect: the lane's work is part of it in any case.
        """
        end = self._clock.now()
        with self._lock:
            if step != self.step:
                return
            self._lane_end = end
        self._choose_samples(step + 1)

    def deliver(self) -> None:
        """Report all phases that have ended so far; on a GPU, wait until it has reached their ends."""
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
