"""The jobs of a lane: functions, and jobs that run in steps so that two of them can overlap."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchbagua._torch import future_of
from torchbagua.transport.streams import LaneStream

T = TypeVar("T")
R = TypeVar("R", covariant=True)


class InSteps(Protocol[R]):
    """Work that a lane runs in steps, such as a bucket."""

    def may_begin(self) -> bool:
        """Return whether `steps` reaches its first yield without waiting for another rank."""
        ...

    def steps(self) -> Generator[None, None, R]:
        """Run. Yield after the start, and then whenever the next job may begin; never yield to run alone."""
        ...


class Worker(Protocol):
    """The interface of the lane's worker for its jobs.

    Attributes:
        waiting: returns a context manager, entered while another thread waits for a job.
    """

    waiting: Callable[[], AbstractContextManager[None]]

    def begin_next(self) -> None:
        """Begin the job after the running one, if it is queued and runs in steps."""
        ...

    def raise_late_failure(self) -> None:
        """Raise the error of asynchronous work that finished jobs had launched, if there is one."""
        ...

    def wait_for_gpu(self, mark: Any) -> None:
        """Wait until the GPU has reached `mark`. Raises if it was not reached, or only because work was aborted."""
        ...

    def wait_for(self, done: "torch.futures.Future[Any]") -> None:
        """Wait until a job is done, on another thread."""
        ...


class Job(ABC, Generic[T]):
    """A unit of work for a lane. `Lane.submit` and `Lane.submit_steps` return one."""

    def __init__(self, worker: Worker, side: LaneStream | None) -> None:
        self._worker = worker
        self._side = side
        self._ready = None if side is None else side.mark()
        self._end: Any = None  # the position of the lane's stream after the job's work
        self._failure: BaseException | None = None
        self._done: torch.futures.Future[Any] = torch.futures.Future() if side is None else side.new_future()

    def future(self) -> "torch.futures.Future[T]":
        """Return a torch future of the value of `result`. Errors of other types are raised as a RuntimeError."""
        return future_of(self._done, self._outcome)

    def is_done(self) -> bool:
        """Return whether the job has returned or raised."""
        return self._done.done()

    def wait(self) -> None:
        """Wait as `result` does, and do not raise the job's error."""
        self._worker.wait_for(self._done)

    def result(self) -> T:
        """Wait until the job is done. Return its value, or raise its error.

        On a GPU, a job is done when all its work is launched. The stream of this thread waits for that work. If the
        work fails later, the `poll` of the lane detects it, and this method raises the error from then on. By then,
        writes that follow the work in stream order have executed: call `finish` before a write to a module.
        """
        with nullcontext() if self._done.done() else self._worker.waiting():
            self.wait()
        self._worker.raise_late_failure()
        return self._outcome()

    def finish(self, *, reads: bool = False) -> T:
        """Wait as `result` does, and then until a GPU has finished the job's work; required before a write to a module.

        Args:
            reads: wait for this thread's stream too, since the host is about to read from it. A read alone would block
                for as long as the GPU waits for a rank that died, whatever the lane has detected.
        """
        value = self.result()
        if self._side is not None:
            self._worker.wait_for_gpu(self._side.mark() if reads else self._end)
        return value

    def run(self) -> None:
        """Run the job, on the lane's thread."""
        if self._side is None or self._ready is None:
            self._value = self._compute()
            self._done.set_result(None)
            return
        self._side.bind_thread()
        with self._side.after(self._ready):
            self._value = self._compute()
            self._end = self._side.mark()
            self._done.set_result(self._side.token)

    def begin(self) -> None:
        """Begin while another job is in progress, if possible; on the lane's thread."""

    def fail(self, error: BaseException) -> None:
        """Finish the job with `error`, which `result` then raises."""
        self._failure = error
        self._done.set_result(None)

    @abstractmethod
    def _compute(self) -> T:
        """Compute and return the value, and drop all references that the computation needed."""

    def _outcome(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._value


class JobOfFunction(Job[T]):
    """A job that calls a function; see `Job`."""

    def __init__(self, run: Callable[[], T], worker: Worker, side: LaneStream | None) -> None:
        super().__init__(worker, side)
        self._run = run

    def _compute(self) -> T:
        value = self._run()
        del self._run
        return value


class JobInSteps(Job[T]):
    """A job that runs in steps, and may begin while the previous job is in progress; see `Job`."""

    def __init__(self, source: InSteps[T], worker: Worker, side: LaneStream | None) -> None:
        super().__init__(worker, side)
        self._source = source
        self._begun: Generator[None, None, T] | None = None

    def begin(self) -> None:
        if self._side is None and self._begun is None and self._source.may_begin():
            self._begun = self._source.steps()
            next(self._begun)

    def fail(self, error: BaseException) -> None:
        if self._begun is not None:
            self._begun.close()
        super().fail(error)

    def _compute(self) -> T:
        begun, self._begun = self._begun, None
        has_begun, steps = begun is not None, begun or self._source.steps()
        del self._source
        try:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                if has_begun:
                    self._worker.begin_next()
                has_begun = True
        finally:
            steps.close()
