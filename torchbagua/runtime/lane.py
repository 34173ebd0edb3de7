"""The lane: runs an algorithm's communication in one order, concurrently with training.

A bucket of gradients, from DDP's hook to its future, between CPUs:

1. The thread of backward, which is the training thread between CPUs, queues the bucket (`submit_overlapping`) and
   returns `Job.future` to DDP.
2. The lane's thread takes it. The first bucket of a backward also posts the rank's progress (meeting.py).
3. The mean posts its receives, queues its chunks in the `Pipeline` (collectives/exchange.py), which encodes and sends
   them in turn, and yields (`TwoPhaseMean.run_overlapping`). This yield begins no other job: the messages of the
   second phase are not queued yet.
4. At each later yield all messages of the mean are queued, and it would only wait: the next job may begin, if it is
   queued and its `may_begin` is true. It runs up to its own first yield, so at most two means are in flight.
5. The mean receives, sums, sends and decodes the rest. The first bucket compares progress. The future completes.
6. DDP's callback waits for the futures of all buckets at the end of backward.

In stream order, on a GPU, `launch` runs a bucket at once on the thread of backward, which then belongs to the autograd
engine, and no host waits.
"""

import os
import queue
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchbagua import _concurrency
from torchbagua._torch import future_of
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.transport.streams import LaneStream, SideStream, ThreadStream, has_reached, wait_on_host

T = TypeVar("T")

R = TypeVar("R", covariant=True)

_POLL_EVERY_S = 0.05

_LOOK_EVERY_S = 5.0

# If an exception ends the training, a running job gets this time before it is abandoned, and as much to end then.
_LAST_JOB_S = 2.0


class Overlappable(Protocol[R]):
    """Work that may begin while the lane's running job waits, such as a bucket."""

    def may_begin(self) -> bool:
        """Return whether it may begin now, while another job waits; see `OverlappingMean.may_begin`."""
        ...

    def run_overlapping(self) -> Generator[None, None, R]:
        """Run. Yield after the start, and then whenever the next job may begin; never yield to run alone."""
        ...


class Job(ABC, Generic[T]):
    """A unit of work for a lane. `Lane.submit` and `Lane.submit_overlapping` return one."""

    _end: Any = None  # the position of the lane's stream after the job's work
    _failure: BaseException | None = None

    def __init__(self, worker: "_Worker", side: LaneStream | None) -> None:
        self._worker = worker
        self._side = side
        self._ready = None if side is None else side.mark()
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
        work fails later, the lane's thread detects it, and this method raises the error from then on. By then,
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
        """Run up to the first yield while the previous job waits, if possible; `run` then continues from there."""

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

    def __init__(self, run: Callable[[], T], worker: "_Worker", side: LaneStream | None) -> None:
        super().__init__(worker, side)
        self._run = run

    def _compute(self) -> T:
        value = self._run()
        del self._run
        return value


class OverlappingJob(Job[T]):
    """A job that may begin while the previous job is in progress; see `Job`."""

    _begun: Generator[None, None, None] | None = None  # at its first yield, if the job began early

    def __init__(self, source: Overlappable[T], worker: "_Worker", side: LaneStream | None) -> None:
        super().__init__(worker, side)
        self._source = source

    def begin(self) -> None:
        if self._side is None and self._begun is None and self._source.may_begin():
            self._begun = self._parts()
            next(self._begun)

    def fail(self, error: BaseException) -> None:
        if self._begun is not None:
            self._begun.close()
        super().fail(error)

    def _compute(self) -> T:
        begun, self._begun = self._begun, None
        parts = begun or self._parts()
        try:
            if begun is None:
                next(parts, None)  # as in `begin`; the next job may begin only at later yields
            for _ in parts:
                self._worker.begin_next()
        finally:
            parts.close()
        return self._value

    def _parts(self) -> Generator[None, None, None]:
        source = self._source
        del self._source
        self._value = yield from source.run_overlapping()


class Lane:
    """Runs jobs in sequence: `submit` queues a job for the lane's thread, `launch` runs a job immediately.

    All ranks submit, or launch, the same jobs in the same order, so their messages match. If a job raises, the lane
    ends, since later jobs would be paired with different jobs on other ranks. All later jobs fail with the same error.
    The thread is a daemon: it starts with the first submitted job and ends with `close`.

    On a GPU (`use_gpu`) all jobs run on one stream. A job runs after the work that was already on the stream of the
    submitting thread. Work that a thread enqueues after it waits for the job runs after the job.

    Args:
        name: the name of the thread.
        on_failure: called on the lane's thread after a job has raised, before any waiting thread is notified.
        group: the group over which jobs communicate. It explains the error of a job, and is abandoned if `close` ends a
            job that waits for another rank. Between jobs, the lane's thread looks for operations of a GPU that fail,
            and for failed ranks.

    Attributes:
        check_process: raises RuntimeError in a process that was forked from the one with the lane's thread. A function
            that does not refer to the lane.
    """

    def __init__(self, name: str, on_failure: Callable[[], None], group: BaguaProcessGroup | None = None) -> None:
        self._worker = _Worker(name, on_failure, group)
        self.check_process = self._worker.check_process
        self._lock = _concurrency.Lock()  # ensures that no job is queued after the stop
        self._thread: _concurrency.Thread | None = None
        # With a standalone hook, nobody calls close. Garbage collection of the lane then stops the thread, so the
        # thread refers to the worker only, not to the lane.
        self._stop = _concurrency.finalize(self, self._worker.stop)
        self._stop.atexit = False
        # If the interpreter exits while the thread is inside a backend, the process aborts.
        self._close_at_exit = partial(_close, weakref.ref(self))
        _concurrency.finalize(self, _concurrency.unregister_at_exit, self._close_at_exit).atexit = False

    def use_gpu(self, device: torch.device) -> None:
        """Run all later jobs on a stream of this GPU. Raises ValueError if an earlier call set another GPU."""
        worker = self._worker
        if worker.gpu is None:
            assert worker.group is not None, "a lane that uses a GPU must have a group"
            worker.gpu = LaneGpu(SideStream(device) if device.type == "cuda" else ThreadStream(device), worker.group)
        used = worker.gpu.side.device
        if used != device:
            raise ValueError(f"{worker.name}: all tensors must be on one GPU, got some on {device}, others on {used}")

    def launch(self, run: Callable[[], torch.Tensor]) -> "torch.futures.Future[torch.Tensor]":
        """Run a function immediately, on this thread and the lane's stream. It only launches kernels and collectives.

        If the function raises, it must already have closed its groups, as a bucket does.

        Returns:
            A future of the function's value. The stream of a thread that waits for it waits for the lane's stream.

        Raises:
            RuntimeError: the lane is closed.
            BaseException: the error of an earlier job that failed.
        """
        worker, gpu = self._worker, self._worker.gpu
        assert gpu is not None, "call use_gpu before launch"
        if not self._stop.alive:
            raise RuntimeError(f"{worker.name} is closed")
        if worker.failure is not None:
            raise worker.failure
        gpu.num_launched += 1
        if gpu.num_launched == 1 and gpu.group.launches_on_users_group:
            self._submit(JobOfFunction(lambda: None, worker, None))  # starts the thread, or wakes it, to look
        future = gpu.side.new_future()
        with gpu.side.after(gpu.side.mark()):
            try:
                future.set_result(run())
            except BaseException as error:
                failure = worker.fail_first(error)
                if failure is not error:  # a job failed in the meantime and closed the groups
                    raise failure from error
                raise
        return future

    def submit_overlapping(self, source: Overlappable[T]) -> "Job[T]":
        """Queue work that may overlap with the previous job, and return the job, as `submit` does.

        At every yield after the first, the next job may begin if it overlaps too. The next job continues after
        this job is complete.

        Raises:
            RuntimeError: the lane is closed.
        """
        return self._submit(OverlappingJob(source, self._worker, self._worker.side))

    def submit(self, run: Callable[[], T], *, interrupt: Callable[[], None] | None = None) -> "Job[T]":
        """Queue a function, and return the job. `Job.result` returns the function's value, or raises its error.

        Args:
            run: called on the lane's thread.
            interrupt: a method that stops a `run` that would otherwise never return. It is called by `close`, or when
                the lane is garbage-collected, if the method's object still exists. It replaces an earlier one.

        Raises:
            RuntimeError: the lane is closed.
        """
        return self._submit(JobOfFunction(run, self._worker, self._worker.side), interrupt)

    def _submit(self, job: "Job[T]", interrupt: Callable[[], None] | None = None) -> "Job[T]":
        worker = self._worker
        worker.check_process()
        with self._lock:
            if not self._stop.alive:
                raise RuntimeError(f"{worker.name} is closed")
            if self._thread is None:
                self._thread = _concurrency.Thread(target=worker.work, name=worker.name, daemon=True)
                self._thread.start()
                _concurrency.at_exit(self._close_at_exit)
            if interrupt is not None:
                worker.interrupt = weakref.WeakMethod(interrupt)
            worker.queue(job)
        return job

    @property
    def has_failed(self) -> bool:
        """Whether a job has raised."""
        return self._worker.failure is not None

    def clear_failure(self) -> None:
        """Release what the frames in the error's traceback refer to: those of the training loop refer to modules.

        Jobs keep the error, and DDP's reducer keeps jobs, so that the garbage collector does not find the cycle.
        """
        if self._worker.failure is not None:
            _clear_frames(self._worker.failure)

    @property
    def is_of_other_process(self) -> bool:
        """Whether this process was forked from the one with the lane's thread."""
        return self._worker.is_of_other_process

    def close(self, *, in_order: bool = True) -> None:
        """Finish the queued jobs and end the thread. Does nothing in a forked process.

        It blocks until the running job is done, without a timeout, unless the end is not in order: an exception ends
        the training, or one of a signal handler has ended a wait for a job, or this wait. A job that waits for another
        rank is then abandoned.
        """
        worker = self._worker
        if worker.is_of_other_process:
            return
        with self._lock:
            self._stop()
        if self._thread is not None:
            has_ended = False
            try:
                has_ended = worker.await_end(in_order=in_order)
            finally:
                if not has_ended:
                    if worker.group is not None:
                        worker.group.private.abandon()
                    has_ended = worker.await_end(in_order=False)
            if has_ended:
                self._thread.join()
        if worker.gpu is not None:
            worker.gpu.has_finished = has_reached(worker.gpu.side.end())
            worker.gpu.side.join()  # the caller may free and reuse the memory that the stream still writes to
        _concurrency.unregister_at_exit(self._close_at_exit)


def _close(lane: "weakref.ref[Lane]") -> None:
    if (alive := lane()) is not None:
        alive.close()


def _clear_frames(error: BaseException) -> None:
    """Release objects, such as connections, that the frames in the tracebacks of `error` and its causes refer to."""
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        error = todo.pop()
        if error not in seen:
            seen.append(error)
            traceback.clear_frames(error.__traceback__)
            todo += [cause for cause in (error.__cause__, error.__context__) if cause is not None]


@dataclass
class LaneGpu:
    """The GPU of a lane, and the work that its jobs have launched there.

    Attributes:
        side: the stream of the lane.
        group: the group of the lane.
        num_launched: the number of calls of `Lane.launch`. From the first on, the lane looks for failed ranks.
        late_failure: the error of asynchronous work that finished jobs had launched; None if there is no error.
        has_finished: whether the GPU had finished all work when the lane was closed.
    """

    side: LaneStream
    group: BaguaProcessGroup
    num_launched: int = 0
    late_failure: BaseException | None = None
    has_finished: bool = False

    def is_working(self) -> bool:
        """Return whether it is still executing work that jobs launched, or has not finished it in time."""
        try:
            return self.group.private.poll()
        except BaseException:  # the work has already timed out
            return True

    def is_stuck(self) -> bool:
        """Return whether it does not finish the launched work soon."""
        self.side.bind_thread()
        try:
            wait_on_host(self.side.end(), _LOOK_EVERY_S)
        except TimeoutError:
            return True
        return False


class _Worker:
    """The state of the lane's thread: the queue, and the error that ended it.

    Attributes:
        name, group: the arguments of the lane.
        gpu: the GPU on which jobs run; None if they run on the CPU.
        failure: the error that ended the lane; None before.
        interrupt: stops the running job, if it would otherwise never return.
    """

    def __init__(self, name: str, on_failure: Callable[[], None], group: BaguaProcessGroup | None) -> None:
        self.name = name
        self.group = group
        self.gpu: LaneGpu | None = None
        self.failure: BaseException | None = None
        self.interrupt: weakref.WeakMethod[Callable[[], None]] | None = None
        self._on_failure = on_failure
        self._process = os.getpid()
        self._jobs: _concurrency.SimpleQueue[Job[Any] | None] = _concurrency.SimpleQueue()
        self._peeked: list[Job[Any] | None] = []  # the next job, if it was taken from the queue to see if it may begin
        self._is_interrupted = False  # whether a signal handler has raised while a thread waited for a job
        self._is_stopped = False
        self._lock = _concurrency.Lock()  # ensures that no job is queued after a failure
        self._running = _concurrency.Lock()  # held until the thread's work ends
        self._running.acquire()

    @property
    def side(self) -> LaneStream | None:
        """The stream on which jobs run; None on the CPU."""
        return None if self.gpu is None else self.gpu.side

    @property
    def is_of_other_process(self) -> bool:
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the one with the lane's thread."""
        if self.is_of_other_process:
            raise RuntimeError(
                f"{self.name}: it belongs to process {self._process}, and this is process {os.getpid()}, which was "
                "forked without its threads and connections; train and detach in the first process only"
            )

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which another thread waits for a job; observers are notified of its duration."""
        return nullcontext() if self.group is None else self.group.tracer.span("wait")

    def wait_for(self, done: "torch.futures.Future[Any]") -> None:
        """Wait until a job is done, on another thread."""
        if not done.done():
            self.check_process()
        try:
            _concurrency.wait_for(done)
        except BaseException:
            self._is_interrupted = True
            raise

    def queue(self, job: Job[Any]) -> None:
        with self._lock:
            if self.failure is None:
                self._jobs.put(job)
            else:
                job.fail(self.failure)

    def begin_next(self) -> None:
        """Begin the job after the running one, if it is queued and may begin. Else it stays the next job to run."""
        if not self._peeked:
            with suppress(queue.Empty):
                self._peeked.append(self._jobs.get_nowait())
        if self._peeked and (job := self._peeked[0]) is not None:
            job.begin()

    def wait_for_gpu(self, mark: Any) -> None:
        """Wait until the GPU has reached `mark`. Raises if it was not reached, or only because work was aborted."""
        assert self.gpu is not None
        with nullcontext() if has_reached(mark) else self.waiting():
            has_finished = self.gpu.group.private.wait_for_mark(mark, self.raise_late_failure)
        self.raise_late_failure()  # the lane sets it before it aborts the work, which ends the work early
        if not (has_finished or self.gpu.has_finished):
            if not self._is_stopped:
                # A running job has closed the groups, and its error is about to end the lane, with the queued jobs.
                last = JobOfFunction(lambda: None, self, None)
                self.queue(last)
                last.result()
            raise RuntimeError("torchbagua: the groups were closed while a GPU was working on their operations")

    def raise_late_failure(self) -> None:
        """Raise the error of asynchronous work that finished jobs had launched, if there is one."""
        if self.gpu is not None and self.gpu.late_failure is not None:
            raise self.gpu.late_failure

    def fail_first(self, error: BaseException) -> BaseException:
        """Record `error` as the failure of the lane, unless one is already recorded. Return the recorded failure."""
        with self._lock:
            self.failure = self.failure or error
            return self.failure

    def stop(self) -> None:
        if self.is_of_other_process:
            return
        self._is_stopped = True
        self._jobs.put(None)
        if self.interrupt is not None and (interrupt := self.interrupt()) is not None:
            interrupt()

    def work(self) -> None:
        try:
            while self._run_next():
                pass
        finally:
            self._running.release()

    def await_end(self, *, in_order: bool) -> bool:
        """Wait for the end of `work`, for a bounded time if it is not in order. Return whether it has ended.

        `Thread.join` would count the thread as ended once a signal handler has raised in it (Python 3.11).
        """
        has_ended = self._running.acquire(timeout=-1 if in_order and not self._is_interrupted else _LAST_JOB_S)
        if has_ended:
            self._running.release()  # for a later call
        return has_ended

    def _run_next(self) -> bool:
        """Run the next job. A separate function, so that an idle thread does not keep a finished job alive."""
        job: Job[Any] | None = None
        try:
            job = self._next_job()
            if job is not None:
                job.run()
        except BaseException as cause:  # on any error, the training thread must not wait forever
            with self._lock:
                self.failure = error = cause
            try:
                if self.gpu is not None and self.gpu.is_working():
                    self.gpu.late_failure = error
                _clear_frames(error)
                self._on_failure()
                if self.group is not None:
                    self.failure = error = self.group.explain(error)
            finally:
                if job is not None:
                    job.fail(error)
                while not self._jobs.empty():
                    self._peeked.append(self._jobs.get())
                for queued in self._peeked:
                    if queued is not None:
                        queued.fail(error)
                self._peeked.clear()
            return False
        return job is not None

    def _next_job(self) -> "Job[Any] | None":
        """Wait for a job. Meanwhile, look for failures of the work that the last jobs launched on a GPU."""
        if self._peeked:
            return self._peeked.pop()
        if (gpu := self.gpu) is None:
            return self._jobs.get()
        while gpu.group.private.poll():
            with suppress(queue.Empty):
                return self._jobs.get(timeout=_POLL_EVERY_S)
        num_seen = -1
        while gpu.num_launched and gpu.group.launches_on_users_group:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=_LOOK_EVERY_S)
            if num_seen == gpu.num_launched:
                gpu.group.look_for_failed_rank(gpu.is_stuck)
            num_seen = gpu.num_launched
        return self._jobs.get()
