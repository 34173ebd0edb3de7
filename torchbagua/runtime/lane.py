"""The lane: what runs an algorithm's communication in one order, beside training."""

import atexit
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from torchbagua.runtime.job import InSteps, Job, JobInSteps, JobOfFunction
from torchbagua.transport.streams import LaneStream, SideStream, ThreadStream

T = TypeVar("T")

_POLL_EVERY_S = 0.05


class Lane:
    """Runs jobs one after the other: `submit` queues one for a thread of the lane, `launch` runs one at once.

    All ranks submit, or launch, the same jobs in the same order, so whatever they send is matched. A job that raises
    ends the lane, since the jobs after it would pair with other jobs on other ranks. All of them fail with the same
    error. The thread is a daemon: it starts with the first submitted job and ends with `close`.

    On a GPU (`use_gpu`) all jobs run on one stream. A job comes after what was on the stream of the thread that
    submitted it, and before what a thread that waits for it puts on its own stream.

    Args:
        name: the name of the thread.
        on_failure: called on the lane's thread when a job has raised, before anyone is told.
        waiting: a context manager, entered while another thread waits for a job.
        poll: called on the lane's thread between jobs, as long as it returns True: whether a GPU is still working on
            what they launched. If it raises, the lane ends, and every job raises that error from then on.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        poll: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker = _Worker(on_failure, waiting, poll)
        self._side: LaneStream | None = None
        self._name = name
        self._lock = threading.Lock()  # nothing is queued behind the stop
        self._thread: threading.Thread | None = None
        # Behind a DDP hook nobody calls close: a lane that is forgotten stops the thread, which therefore knows the
        # worker and not the lane.
        self._stop = weakref.finalize(self, self._worker.stop)
        self._stop.atexit = False
        # A thread that the interpreter's end finds within a backend would abort the process.
        self._close_at_exit = partial(_close, weakref.ref(self))
        weakref.finalize(self, atexit.unregister, self._close_at_exit).atexit = False

    def use_gpu(self, device: torch.device) -> None:
        """Have jobs from now on work on tensors of this GPU. Raises ValueError for another GPU than before."""
        if self._side is None:
            self._side = SideStream(device) if device.type == "cuda" else ThreadStream(device)
        if self._side.device != device:
            raise ValueError(
                f"{self._name}: all tensors must be on one GPU, got some on {device}, others on {self._side.device}"
            )

    def launch(self, run: Callable[[], torch.Tensor]) -> "torch.futures.Future[torch.Tensor]":
        """Run a function at once, on this thread and the lane's stream. It only launches kernels and collectives.

        If it raises, it has closed its groups itself, as a bucket does.

        Returns:
            A future of what it returns. The stream of whoever waits for it waits for that of the lane.

        Raises:
            RuntimeError: the lane is closed.
            BaseException: a job has raised this before.
        """
        assert self._side is not None, "use_gpu comes first"
        if not self._stop.alive:
            raise RuntimeError(f"{self._name} is closed")
        if self._worker.failure is not None:
            raise self._worker.failure
        future = self._side.new_future()
        with self._side.after(self._side.mark()):
            try:
                future.set_result(run())
            except BaseException as error:
                failure = self._worker.fail_first(error)
                if failure is not error:  # a job has raised meanwhile, and closed the groups
                    raise failure from error
                raise
        return future

    def submit_steps(self, source: InSteps[T]) -> "Job[T]":
        """Queue what runs in steps, and return the job, as `submit` does.

        Wherever it yields after the first time, the next job may begin, if that has steps too. That goes on when this
        one is complete.

        Raises:
            RuntimeError: the lane is closed.
        """
        return self._submit(JobInSteps(source, self._worker, self._side))

    def submit(self, run: Callable[[], T], *, interrupt: Callable[[], None] | None = None) -> "Job[T]":
        """Queue a function, and return the job. `Job.result` returns what it returns, or raises what it raises.

        Args:
            run: called on the lane's thread.
            interrupt: a method that ends `run` if it would go on for ever. It is called by `close`, or when nobody has
                the lane any more, if its object still exists. It replaces an earlier one.

        Raises:
            RuntimeError: the lane is closed.
        """
        return self._submit(JobOfFunction(run, self._worker, self._side), interrupt)

    def _submit(self, job: "Job[T]", interrupt: Callable[[], None] | None = None) -> "Job[T]":
        with self._lock:
            if not self._stop.alive:
                raise RuntimeError(f"{self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._worker.work, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self._close_at_exit)
            if interrupt is not None:
                self._worker.interrupt = weakref.WeakMethod(interrupt)
            self._worker.queue(job)
        return job

    @property
    def has_failed(self) -> bool:
        """Whether a job has raised."""
        return self._worker.failure is not None

    def close(self) -> None:
        """Finish the queued jobs and end the thread. It waits for the running job as long as that may take."""
        with self._lock:
            self._stop()
        if self._thread is not None:
            self._thread.join()
        if self._side is not None:
            self._side.join()  # what it still writes to may be let go now, and used again
        atexit.unregister(self._close_at_exit)


def _close(lane: "weakref.ref[Lane]") -> None:
    if (alive := lane()) is not None:
        alive.close()


def _clear_frames(error: BaseException) -> None:
    """Let go of what the finished functions in the tracebacks of `error` and its causes held: connections, say."""
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        error = todo.pop()
        if error not in seen:
            seen.append(error)
            traceback.clear_frames(error.__traceback__)
            todo += [cause for cause in (error.__cause__, error.__context__) if cause is not None]


class _Worker:
    """What the thread holds: the queue and the error that ended it.

    Attributes:
        failure: that error, None before.
        late_failure: the error of what jobs had launched and returned, None before.
        interrupt: ends the job that runs, if it would go on for ever.
        waiting: entered by who waits for a job.
    """

    def __init__(
        self,
        on_failure: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
        poll: Callable[[], bool],
    ) -> None:
        self._on_failure = on_failure
        self.waiting = waiting
        self._poll = poll
        self._peeked: list[Job[Any] | None] = []  # the next job, once it was asked whether it may begin
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between a job that is queued and the failure after which none runs
        self.failure: BaseException | None = None
        self.late_failure: BaseException | None = None
        self.interrupt: weakref.WeakMethod[Callable[[], None]] | None = None

    def queue(self, job: Job[Any]) -> None:
        with self._lock:
            if self.failure is None:
                self._jobs.put(job)
            else:
                job.fail(self.failure)

    def begin_next(self) -> None:
        """Begin the job behind the one that runs, if it is there and has steps."""
        if not self._peeked:
            with suppress(queue.Empty):
                self._peeked.append(self._jobs.get_nowait())
        if self._peeked and (job := self._peeked[0]) is not None:
            job.begin()

    def fail_first(self, error: BaseException) -> BaseException:
        """Take `error` for the one that ended the lane, unless there is one; return that one."""
        with self._lock:
            self.failure = self.failure or error
            return self.failure

    def stop(self) -> None:
        self._jobs.put(None)
        if self.interrupt is not None and (interrupt := self.interrupt()) is not None:
            interrupt()

    def work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job; a function of its own, so that an idle thread keeps no finished job alive."""
        job: Job[Any] | None = None
        try:
            job = self._next_job()
            if job is not None:
                job.run()
        except BaseException as error:  # whatever it is, the training thread must not wait for ever
            with self._lock:
                self.failure = error
            try:
                if self._is_under_way():
                    self.late_failure = error
                _clear_frames(error)
                self._on_failure()
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
        """Wait for a job, and meanwhile poll what the last ones have launched."""
        if self._peeked:
            return self._peeked.pop()
        while self._poll():
            with suppress(queue.Empty):
                return self._jobs.get(timeout=_POLL_EVERY_S)
        return self._jobs.get()

    def _is_under_way(self) -> bool:
        try:
            return self._poll()
        except BaseException:  # too long by now
            return True
