"""Threads, locks, queues and clocks in virtual time, with the interfaces of Python's that `_concurrency` has."""

import math
import queue
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from torchbagua.testing.simulation.scheduler import Scheduler, SimulatedThread

T = TypeVar("T")


class Primitives:
    """The attributes of `torchbagua._concurrency` in a simulation, made for its scheduler.

    Exit handlers and finalizers belong to the rank whose thread registers them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._exit_handlers: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    def replacements(self) -> dict[str, Any]:
        """Return the simulated attributes by name."""
        scheduler = self.scheduler

        def bound(kind: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments, **named: kind(scheduler, *arguments, **named)

        return {
            "Thread": bound(Thread),
            "Lock": bound(Lock),
            "Condition": bound(Condition),
            "SimpleQueue": bound(SimpleQueue),
            "monotonic": lambda: scheduler.now_s,
            "perf_counter": lambda: scheduler.now_s,
            "perf_counter_ns": lambda: round(scheduler.now_s * 1e9),
            "sleep": self.sleep,
            "wait_for": self.wait_for,
            "finalize": self.finalize,
            "at_exit": self.at_exit,
            "unregister_at_exit": self.unregister_at_exit,
        }

    def exit(self, rank: int) -> None:
        """Call the exit handlers of a rank, the last one first, as Python does when a process ends.

        Like Python, it prints the error of a handler that raises, and continues.
        """
        handlers = self._exit_handlers[rank]
        while handlers:
            try:
                handlers.pop()()
            except Exception:
                traceback.print_exc()

    def close(self) -> None:
        """Keep the finalizers of dead ranks from running when the real process ends."""
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def finalize(self, obj: object, function: Callable[..., Any], *arguments: Any) -> "weakref.finalize[Any, Any]":
        finalizer = weakref.finalize(obj, function, *arguments)
        self._finalizers.append(finalizer)

        def at_exit() -> None:
            if finalizer.atexit:
                finalizer()

        self.at_exit(at_exit)
        return finalizer

    def at_exit(self, handler: Callable[[], object]) -> None:
        thread = self.scheduler.current
        assert thread is not None, "a thread of a rank registers it"
        self._exit_handlers[thread.rank].append(handler)

    def unregister_at_exit(self, handler: Callable[[], object]) -> None:
        for handlers in self._exit_handlers.values():
            while handler in handlers:
                handlers.remove(handler)

    def sleep(self, seconds: float) -> None:
        self.scheduler.block(lambda: False, seconds)

    def wait_for(self, future: "torch.futures.Future[Any]") -> None:
        self.scheduler.block(future.done)
        future.wait()


class Lock:
    """`threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_free = self._scheduler.block(
            lambda: not self._is_locked, 0 if not blocking else math.inf if timeout < 0 else timeout
        )
        if is_free:
            self._is_locked = True
        return is_free

    def release(self) -> None:
        self._is_locked = False

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(eq=False)
class _Waiter:
    is_notified: bool = False


class Condition(Lock):
    """`threading.Condition`, with its own lock, which is reentrant."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: SimulatedThread | None = None
        self._depth = 0
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        thread = self._scheduler.current
        if self._depth and self._owner is thread:
            self._depth += 1
            return True
        if super().acquire(blocking, timeout):
            self._owner, self._depth = thread, 1
            return True
        return False

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = _Waiter()
        self._waiting.append(waiter)
        depth, self._depth = self._depth, 1
        self.release()
        try:
            return self._scheduler.block(lambda: waiter.is_notified, math.inf if timeout is None else timeout)
        finally:
            if not waiter.is_notified:
                self._waiting.remove(waiter)
            self.acquire()
            self._depth = depth

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end_s = math.inf if timeout is None else self._scheduler.now_s + timeout
        while not (result := predicate()) and (left_s := end_s - self._scheduler.now_s) > 0:
            self.wait(None if left_s == math.inf else left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft().is_notified = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimpleQueue(Generic[T]):
    """`queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        wait_s = 0 if not block else math.inf if timeout is None else timeout
        if not self._scheduler.block(lambda: bool(self._items), wait_s):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class Thread:
    """`threading.Thread`, of the rank whose thread creates it."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        daemon: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._target = target
        self._arguments = args
        self._thread: SimulatedThread | None = None
        self.name = name

    def start(self) -> None:
        parent = self._scheduler.current
        assert parent is not None, "a thread of a rank starts it"
        self._thread = self._scheduler.start(self.name, parent.rank, lambda: self._target(*self._arguments))

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.block(lambda: not self.is_alive(), math.inf if timeout is None else timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_done
