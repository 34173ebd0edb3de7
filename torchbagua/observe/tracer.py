"""The tracer: it converts the phases of an algorithm's work into events, and passes them to observers."""

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.autograd import profiler

from torchbagua import _concurrency
from torchbagua._environment import environment
from torchbagua._torch import is_profiling
from torchbagua._warnings import warn_user_during_error
from torchbagua.observe.clocks import Clock, GpuClock, HostClock, TimedPhase, TimedStep, Timestamp
from torchbagua.observe.events import CommEvent, Details, Observer, Phase, Run, Trace, TraceError

# Limits the pending phases if no step ends for a long time.
_MOST_PENDING = 5_000

_NO_DETAILS = Details()


class Span:
    """A phase in progress; also a context manager. A phase that ends with an exception is not reported.

    This class is the null span, NO_SPAN, which does nothing: it is used without observers. Its subclasses implement the
    methods.
    """

    __slots__ = ()

    def begin(self) -> None:
        """Start the clock."""

    def end(self) -> None:
        """Stop the clock, and report the phase to the observers."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        pass


NO_SPAN = Span()


class Tracer:
    """Notifies the observers of one group, or of one algorithm that runs on it, of all phases and their times.

    Work on a GPU is timed by events in its streams, without blocking. Observers are therefore notified of a step only
    after the GPU has reached its end, which is checked at the end of later steps.

    Without observers, and outside of torch.profiler, the tracer does nothing. An observer that raises is dropped with a
    warning, and training continues.

    Args:
        observers: are notified of every phase.

    Attributes:
        step: the number of the training step, the common step counter of all events.
        algorithm: the class name of the algorithm.
        has_optimizer: whether `step` counts optimizer steps; it counts averaged backward passes otherwise.
        samples: whether an observer requests measured values in this step.
        failures: the dropped observers, and their errors.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.step = 0
        self.algorithm = ""
        self.has_optimizer = False
        self.samples = False
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
    def is_on(self) -> bool:
        """Whether the tracer has observers."""
        return bool(self._observers)

    @property
    def is_idle(self) -> bool:
        """Whether spans have no effect, because there are no observers and torch.profiler is not active.

        Callers need not check it, since `span` does. A check saves the construction of Details.
        """
        return not (self._observers or is_profiling())

    @property
    def compares_clocks(self) -> bool:
        """Whether an observer needs the offsets between the ranks' clocks."""
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
        """Return the span of a phase, which starts with the `with` block or with `begin`.

        Args:
            phase: the phase.
            details: the details of the phase.
            on_host: whether to use the host's clock even if a GPU is used.
        """
        # On a thread that the profiler does not record, the check is cheaper than a range that is not recorded.
        if is_profiling() and phase != "send":
            return _ProfiledSpan(self, phase, details, on_host)
        return _TracedSpan(self, phase, details, on_host) if self._observers else NO_SPAN

    def bucket_span(self, name: str, flat: torch.Tensor) -> Span:
        """Return the span in which the flat tensor of a bucket, or of a row of shards, is communicated."""
        if self.is_idle:
            return NO_SPAN
        return self.span("bucket", Details(bucket=name, num_elements=flat.numel(), raw_bytes=flat.nbytes))

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range for torch.profiler, if it is active. Observers are not notified of it."""
        return profiler.record_function(f"torchbagua: {name}") if is_profiling() else nullcontext()

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


class _TracedSpan(Span):
    __slots__ = ("_details", "_on_host", "_phase", "_start", "_tracer")

    def __init__(self, tracer: Tracer, phase: Phase, details: Details, on_host: bool) -> None:
        self._tracer = tracer
        self._phase = phase
        self._details = details
        self._on_host = on_host

    def begin(self) -> None:
        self._start = self._tracer.now(on_host=self._on_host)

    def end(self) -> None:
        self._tracer.tell(self._phase, self._start, self._tracer.now(on_host=self._on_host), self._details)

    __enter__ = begin

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is None:
            self.end()


class _ProfiledSpan(_TracedSpan):
    """A traced span that is also a range of torch.profiler."""

    __slots__ = ("_range",)

    def __init__(self, tracer: Tracer, phase: Phase, details: Details, on_host: bool) -> None:
        super().__init__(tracer, phase, details, on_host)
        self._range = profiler.record_function(f"torchbagua: {details.bucket} {phase}")

    def __enter__(self) -> None:
        self._range.__enter__()
        super().__enter__()

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(exception_type, *rest)
        self._range.__exit__(None, None, None)
