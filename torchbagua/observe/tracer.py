"""The tracer: where the phases of an algorithm's work are reported. Without observers, it does nothing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from torchbagua import _concurrency
from torchbagua._torch import is_profiling
from torchbagua.observe.events import Details, Observer, Phase, Run, Timestamp, Trace

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
    """The tracer of a group, or of one algorithm that runs on it, without observers.

    Ranges of torch.profiler, if it is active, need no observers.

    Attributes:
        step: the number of the training step, the common step counter of all events.
        has_optimizer: whether `step` counts optimizer steps; it counts averaged backward passes otherwise.
        samples: whether an observer requests measured values in this step.
        is_on: whether there are observers.
        compares_clocks: whether an observer needs the offsets between the ranks' clocks.
    """

    step = 0
    has_optimizer = False
    samples = False
    is_on = False
    compares_clocks = False

    @property
    def is_idle(self) -> bool:
        """Whether spans have no effect, because there are no observers and torch.profiler is not active.

        Callers need not check it, since `span` does. A check saves the construction of Details.
        """
        return not (self.is_on or is_profiling())

    def start(self, run: Run) -> None:
        """Notify observers of the run. Adds the machine and the software to the run's settings."""

    def count_optimizer_steps(self) -> None:
        """Have `step` count optimizer steps from now on."""
        self.has_optimizer = True

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

    def now(self, *, on_host: bool = False) -> Timestamp:
        """Return the current timestamp: of the GPU's current stream if a GPU is used and `on_host` is not set."""
        return _concurrency.perf_counter_ns()

    def end(self) -> None:
        """Report the remaining phases and the end of the run to the observers, and release them."""

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
        return NO_SPAN

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

    def measure(self, compute: Callable[[], Mapping[str, torch.Tensor]], bucket: str) -> None:
        """Report to observers the values, by name, that `compute` returns, with its duration as a phase."""

    def end_step(self) -> None:
        """Report the training step that has ended to observers, and start the next one."""

    def end_step_of_lane(self, step: int) -> None:
        """Count all further work of the lane towards the step after `step`. The lane's thread calls it.

        If that step has already begun, this has no effect: the lane's work is part of it in any case.
        """

    def deliver(self) -> None:
        """Report all phases that have ended so far; on a GPU, wait until it has reached their ends."""


def check_observers(owner: str, observers: Sequence[Observer]) -> None:
    """Raise TypeError or ValueError unless `observers` is a list of observers; the error names `owner`."""
    if not isinstance(observers, list | tuple):
        raise TypeError(f"{owner}: observers must be a list of objects with a method on_comm(event), got {observers!r}")
    for observer in observers:
        if isinstance(observer, type) or not callable(getattr(observer, "on_comm", None)):
            raise TypeError(f"{owner}: an observer must be an object with a method on_comm(event), got {observer!r}")
        if isinstance(observer, Trace):
            observer.check()


class TracedSpan(Span):
    """A span that is reported to observers."""

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


class _ProfiledSpan(TracedSpan):
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
