"""The tracer: where the phases of an algorithm's work become events, which it tells to observers."""

import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch.autograd import profiler

from torchbagua.events import CommEvent, Observer, Phase, Run, Trace, TraceError

# Where no step ends for long.
_MOST_PENDING = 5_000


Details = Mapping[str, Any]
"""Fields of an event, by name."""

_NO_DETAILS: Details = {}


class Span(Protocol):
    """A phase that is under way; a context manager too. One that ends by an exception is not told of."""

    def begin(self) -> None:
        """Start the clock."""
        ...

    def end(self) -> None:
        """Stop it, and tell the observers."""
        ...

    def __enter__(self) -> None: ...

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None: ...


class Tracer:
    """Tells the observers of one group, or of one algorithm that runs on it, what is done and when.

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
        self._pending: deque[tuple[Phase, int, int, Details]] = deque()  # which threads append to without a lock
        self._is_started = False  # before that there are no steps
        self._step_start_ns = 0

    @property
    def is_on(self) -> bool:
        """Whether anybody listens."""
        return bool(self._observers)

    @property
    def is_idle(self) -> bool:
        """Whether a span would be for nothing: nobody listens, and torch.profiler is not at work."""
        return not (self._observers or profiler._is_profiler_enabled)

    @property
    def compares_clocks(self) -> bool:
        """Whether an observer needs to know how far the ranks' clocks are apart."""
        return any(trace.compares_clocks for trace in self._traces)

    def start(self, run: Run) -> None:
        """Tell observers of the run."""
        self.algorithm = run.algorithm
        self.failures = run.failures
        self._is_started = True
        self._tell_traces(lambda trace: trace.on_start(run))
        self._choose_samples()

    def end(self) -> None:
        """Tell observers of what is left, and that there is nothing more to come; they are let go."""
        self._deliver(time.perf_counter_ns())
        self._tell_traces(lambda trace: trace.on_end())
        self._observers = ()

    def span(self, phase: Phase, details: Details = _NO_DETAILS) -> Span:
        """Return a phase that begins now, or when its `begin` is called.

        Args:
            phase: which.
            details: fields of its event.
        """
        # On a thread that the profiler does not follow, asking is cheaper than a range that nobody sees.
        if profiler._is_profiler_enabled and phase != "send":
            return _ProfiledSpan(self, phase, details)
        return _Span(self, phase, details) if self._observers else NO_SPAN

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range for torch.profiler, where it is at work, of which observers hear nothing."""
        return profiler.record_function(f"torchbagua: {name}") if profiler._is_profiler_enabled else nullcontext()

    def tell(self, phase: Phase, start_ns: int, end_ns: int, details: Details = _NO_DETAILS) -> None:
        """Have observers told, at the end of the step, of a phase that has ended."""
        if not self._observers:
            return
        self._pending.append((phase, start_ns, end_ns, details))
        if not self._is_started or len(self._pending) >= _MOST_PENDING:
            self._deliver(time.perf_counter_ns())

    def measure(self, compute: Callable[[], Mapping[str, float]], bucket: str) -> None:
        """Tell observers of values by name, which it takes `compute` the time of a phase to find."""
        if not self._observers:
            return
        start_ns = time.perf_counter_ns()
        values = compute()
        self.tell("measure", start_ns, time.perf_counter_ns(), {"bucket": bucket, "values": values})

    def end_step(self) -> None:
        """Tell observers of the training step that has ended, and go on to the next."""
        if not self._observers:
            return
        self._deliver(time.perf_counter_ns(), is_step=True)
        self._choose_samples()

    @property
    def _traces(self) -> list[Trace]:
        return [observer for observer in self._observers if isinstance(observer, Trace)]

    def _choose_samples(self) -> None:
        wanted: list[bool] = []
        self._tell_traces(lambda trace: wanted.append(trace.samples(self.step)))
        self.samples = any(wanted)

    def _deliver(self, end_ns: int, *, is_step: bool = False) -> None:
        """Tell observers of what has ended by then; all at once, which takes a fraction of the time."""
        with self._lock:
            events = []
            for _ in range(len(self._pending)):
                phase, start_ns, phase_end_ns, details = self._pending.popleft()
                if phase_end_ns > end_ns:  # in the next step
                    self._pending.append((phase, start_ns, phase_end_ns, details))
                    continue
                if self.step == 0:  # which begins with the first that is done in it
                    self._step_start_ns = min(self._step_start_ns or start_ns, start_ns)
                # The lane may come with what has ended a moment before the step did when that has been told of.
                step = self.step - (phase_end_ns < self._step_start_ns)
                events.append(CommEvent(phase, start_ns, phase_end_ns, step, self.algorithm, **details))
            if is_step:
                events.append(CommEvent("step", self._step_start_ns or end_ns, end_ns, self.step, self.algorithm))
            for observer in self._observers:
                try:
                    for event in events:
                        observer.on_comm(event)
                except Exception as error:
                    self._drop(observer, error)
            if is_step:
                self.step, self._step_start_ns = self.step + 1, end_ns
        self._report_failures()

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
            try:
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # where warnings are errors: no observer may end training
                sys.stderr.write(message)


class _Span:
    __slots__ = ("_details", "_phase", "_start_ns", "_tracer")

    def __init__(self, tracer: Tracer, phase: Phase, details: Details) -> None:
        self._tracer = tracer
        self._phase = phase
        self._details = details

    def begin(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def end(self) -> None:
        self._tracer.tell(self._phase, self._start_ns, time.perf_counter_ns(), self._details)

    __enter__ = begin

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is None:
            self.end()


class _ProfiledSpan(_Span):
    """One that is a range of torch.profiler besides."""

    __slots__ = ("_range",)

    def __init__(self, tracer: Tracer, phase: Phase, details: Details) -> None:
        super().__init__(tracer, phase, details)
        self._range = profiler.record_function(f"torchbagua: {details.get('bucket', '')} {phase}")

    def __enter__(self) -> None:
        self._range.__enter__()
        super().__enter__()

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(exception_type, *rest)
        self._range.__exit__(None, None, None)


class _NoSpan:
    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN = _NoSpan()
