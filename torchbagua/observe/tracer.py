"""The tracer: where the phases of an algorithm's work become events, which it tells to observers."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.autograd import profiler

from torchbagua._environment import environment
from torchbagua._torch import is_profiling
from torchbagua._warnings import warn_user_beside_error
from torchbagua.observe.clocks import Clock, GpuClock, HostClock, TimedPhase, TimedStep, Timestamp
from torchbagua.observe.events import CommEvent, Details, Observer, Phase, Run, Trace, TraceError

# Where no step ends for long.
_MOST_PENDING = 5_000

_NO_DETAILS = Details()


class Span:
    """A phase that is under way; a context manager too. One that ends by an exception is not told of.

    This class is the null span, NO_SPAN, for where nobody listens; those below it do what it says.
    """

    __slots__ = ()

    def begin(self) -> None:
        """Start the clock."""

    def end(self) -> None:
        """Stop it, and tell the observers."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        pass


NO_SPAN = Span()


class Tracer:
    """Tells the observers of one group, or of one algorithm that runs on it, what is done and when.

    What is done on a GPU is timed by events in its streams, for which nobody waits: observers hear of a step when the
    GPU has come to its end, which is seen at the end of a later one.

    Without observers, and outside of torch.profiler, nothing is done. An observer that raises is dropped with a
    warning; training goes on.

    Args:
        observers: hear of every phase.

    Attributes:
        step: the number of the training step, the one clock of all events.
        algorithm: the class of the algorithm, by name.
        has_optimizer: whether the steps of an optimizer are the clock, else averaged backward passes.
        samples: whether an observer wants values measured in this step.
        failures: which observers were dropped, and why.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.step = 0
        self.algorithm = ""
        self.has_optimizer = False
        self.samples = False
        # Each once, also where a group and an attachment over it have been given the same one.
        self._observers = tuple({id(observer): observer for observer in observers}.values())
        self.failures: list[str] = []
        self._unreported: list[tuple[str, int, Exception]] = []
        self._lock = threading.Lock()  # guards the observers, who hear of one thing at a time
        self._clock: Clock = HostClock()
        self._pending: deque[TimedPhase] = deque()  # which threads append to without a lock
        self._unresolved: deque[TimedStep] = deque()
        self._is_started = False  # before that there are no steps
        self._lane_end: Timestamp | None = None  # of the step under way, where the lane goes on to the next before it

    @property
    def is_on(self) -> bool:
        """Whether anybody listens."""
        return bool(self._observers)

    @property
    def is_idle(self) -> bool:
        """Whether a span would be for nothing: nobody listens, and torch.profiler is not at work.

        Nobody has to ask: `span` does. Who does ask spares itself the making of Details.
        """
        return not (self._observers or is_profiling())

    @property
    def compares_clocks(self) -> bool:
        """Whether an observer needs to know how far the ranks' clocks are apart."""
        return any(trace.compares_clocks for trace in self._traces)

    def start(self, run: Run) -> None:
        """Tell observers of the run. The machine and the software are added to its settings."""
        software = {name: str(value) for name, value in environment().items()}
        run = replace(run, settings={**run.settings, **software})
        self.algorithm = run.algorithm
        self.failures = run.failures
        self._is_started = True
        self._tell_traces(lambda trace: trace.on_start(run))
        self._choose_samples(self.step)

    def use_gpu(self, device: torch.device) -> None:
        """Make known that what is traced from now on is done on this GPU, the same each time."""
        if self._observers and not isinstance(self._clock, GpuClock):
            self._clock = GpuClock(device)

    def now(self, *, on_host: bool = False) -> Timestamp:
        """Return this moment of the GPU's current stream, where one is used; on the host always if asked for."""
        return time.perf_counter_ns() if on_host else self._clock.now()

    def end(self) -> None:
        """Tell observers of what is left, and that there is nothing more to come; they are let go."""
        self._deliver()
        self._tell_traces(lambda trace: trace.on_end())
        self._observers = ()

    def span(self, phase: Phase, details: Details = _NO_DETAILS, *, on_host: bool = False) -> Span:
        """Return a phase that begins now, or when its `begin` is called.

        Args:
            phase: which.
            details: what it is about.
            on_host: the host does it, also where there is a GPU.
        """
        # On a thread that the profiler does not follow, asking is cheaper than a range that nobody sees.
        if is_profiling() and phase != "send":
            return _ProfiledSpan(self, phase, details, on_host)
        return _TracedSpan(self, phase, details, on_host) if self._observers else NO_SPAN

    def bucket_span(self, name: str, flat: torch.Tensor) -> Span:
        """Return the phase in which the flat tensor of a bucket, or of a row of shards, is communicated."""
        if self.is_idle:
            return NO_SPAN
        return self.span("bucket", Details(bucket=name, num_elements=flat.numel(), raw_bytes=flat.nbytes))

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range for torch.profiler, where it is at work, of which observers hear nothing."""
        return profiler.record_function(f"torchbagua: {name}") if is_profiling() else nullcontext()

    def tell(self, phase: Phase, start: Timestamp, end: Timestamp, details: Details = _NO_DETAILS) -> None:
        """Have observers told, at the end of the step, of a phase; of none that ended before it could start."""
        if self._observers:
            self._add(TimedPhase(phase, start, end, details))

    def measure(self, compute: Callable[[], Mapping[str, torch.Tensor]], bucket: str) -> None:
        """Tell observers of numbers by name, which it takes `compute` the time of a phase to find."""
        if not self._observers:
            return
        start = self.now()
        measured = self._clock.fetch(compute())
        self._add(TimedPhase("measure", start, self.now(), Details(bucket=bucket), measured))

    def end_step(self) -> None:
        """Tell observers of the training step that has ended, and go on to the next."""
        if not self._observers:
            return
        has_samples = self._deliver(ends_step=True)
        if not has_samples:
            self._choose_samples(self.step)

    def end_step_of_lane(self, step: int) -> None:
        """Make all that the lane does from now on part of the step after `step`; on the lane's thread.

        Where that step has begun by now, all that the lane does is part of it in any case.
        """
        end = self._clock.now()
        with self._lock:
            if step != self.step:
                return
            self._lane_end = end
        self._choose_samples(step + 1)

    def deliver(self) -> None:
        """Tell observers of all that has ended until now; on a GPU, wait until it has come to that."""
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
        self._tell_traces(lambda trace: wanted.append(trace.samples(step)))
        self.samples = any(wanted)

    def _deliver(self, *, ends_step: bool = False) -> bool:
        """Tell observers of what has ended; all at once, which takes a fraction of the time.

        Returns whether the lane has gone on to the next step already.
        """
        with self._lock:
            num_ended = len(self._pending)  # counted before the step ends: none of these ends after it
            end = self._clock.now() if ends_step else None
            phases = [self._pending.popleft() for _ in range(num_ended)]
            lane_end = self._lane_end
            self._unresolved.append(TimedStep(self.step, self.algorithm, phases, end, lane_end))
            while self._unresolved:
                events = self._clock.resolve(self._unresolved[0], waits=not ends_step)
                if events is None:
                    break
                self._unresolved.popleft()
                self._tell(events)
            if ends_step:
                self.step += 1
                self._lane_end = None
        self._report_failures()
        return lane_end is not None

    def _tell(self, events: Sequence[CommEvent]) -> None:
        for observer in self._observers:
            try:
                for event in events:
                    observer.on_comm(event)
            except Exception as error:
                self._drop(observer, error)

    def _tell_traces(self, call: Callable[[Trace], None]) -> None:
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
        """Warn of observers that have been dropped; without the lock, for what warning leads to is not ours."""
        with self._lock:
            unreported, self._unreported = self._unreported, []
        for name, step, error in unreported:
            is_told = isinstance(error, TraceError)
            self.failures.append(
                f"{name} stopped in step {step}: {'' if is_told else f'{type(error).__name__}: '}{error}"
            )
            message = (
                f"torchbagua: the observer {name} failed in step {step} and hears nothing more; training goes on\n"
                f"{error if is_told else ''.join(traceback.format_exception(error))}"
            )
            warn_user_beside_error(message)  # no observer may end training


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
    """One that is a range of torch.profiler besides."""

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
