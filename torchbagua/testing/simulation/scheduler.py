"""The scheduler of a simulation: threads of which one runs at a time, in virtual time, in an order given by a seed.

A thread runs until it blocks. It then gives the turn to a thread that is ready, which the seed selects. If none is
ready, time jumps to the next event or deadline. FoundationDB's simulator and Neon's desim work in this way.
"""

import hashlib
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

# More turns than this without any virtual time between them are an endless loop.
_MOST_TURNS_AT_ONCE = 100_000

# In real time.
_LONGEST_TURN_S = 60.0

_HERE = str(Path(__file__).parent)

Recorder = Callable[["SimulatedThread", float, str], None]
"""Is notified when a thread has waited: the thread, the time at which it began to wait, and the code that waits."""


class Deadlock(RuntimeError):
    """Every thread waits for another one without a deadline, or waits again and again. Contains the stack of each."""


class Ended(BaseException):
    """Unwinds a thread when the simulation ends. Not an Exception: code that handles errors does not catch it."""


class SimulatedThread:
    """A thread of a rank, which runs while it has the turn.

    Attributes:
        name: for messages.
        rank: the rank.
        is_done: whether its function has returned or raised.
        is_dead: whether its rank has died, so that it never runs again.
        is_stuck: whether it has not given up its turn for so long that the simulation has ended without it.
        wakes_s: the time before which it does not run, because its rank has stopped.
    """

    def __init__(self, name: str, rank: int, function: Callable[[], object]) -> None:
        self.name = name
        self.rank = rank
        self.is_done = False
        self.is_dead = False
        self.is_stuck = False
        self.wakes_s = 0.0
        self.is_ready: Callable[[], bool] = lambda: True
        self.deadline_s = math.inf
        self.turn = threading.Lock()  # released to give the turn: faster than a Semaphore
        self.turn.acquire()
        self.os_thread = threading.Thread(target=function, name=name, daemon=True)


class Scheduler:
    """Runs threads one at a time.

    Args:
        seed: determines which of the ready threads runs.

    Attributes:
        now_s: the virtual time, in seconds.
        num_turns: the number of times that a thread got the turn.
        random: the generator for everything that the seed determines.
        digest: a hash of all that has happened: which thread ran, and when.
        recorder: is notified of waits; may be set before the run.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.num_turns = 0
        self.random = random.Random(seed)
        self.digest = hashlib.sha256()
        self.recorder: Recorder | None = None
        self._threads: list[SimulatedThread] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._events_at_turns: dict[int, Callable[[], None]] = {}
        self._numbers = count()
        self._current: SimulatedThread | None = None
        self._is_over: Callable[[], bool] = lambda: True
        self._limit_s = math.inf
        self._ends = False
        self._end = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._num_turns_now = 0

    # For the code that runs the simulation.

    def run(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Run all threads until `is_over`, then end the threads that remain.

        Raises:
            Deadlock: it is not over at the virtual time `limit_s`, or no thread will ever run again, or threads run
                again and again while no time passes, or a thread does not give up its turn.
            Exception: an event has raised it.
        """
        self._is_over = is_over
        self._limit_s = limit_s
        self._give_turn(None)
        try:
            self._wait_for_end()
        finally:  # after a KeyboardInterrupt too
            self._end_threads()
        if self._failure is not None:
            raise self._failure

    def _wait_for_end(self) -> None:
        num_turns, seconds = -1, 0.0
        while not self._end.acquire(timeout=1):
            seconds = seconds + 1 if num_turns == self.num_turns else 0.0
            num_turns = self.num_turns
            running = self._current
            if seconds >= _LONGEST_TURN_S and running is not None:
                self._failure = Deadlock(
                    f"{running.name} of rank {running.rank} has not given up its turn for {seconds:g} s of real time; "
                    f"in a simulation, wait and lock with torchbagua._concurrency only\n{self.stacks()}"
                )
                running.is_stuck = True
                return

    def _end_threads(self) -> None:
        self._ends = True
        for thread in [*self._threads]:  # an ending thread starts no thread
            if thread.is_stuck:
                continue
            if not thread.is_done and thread.turn.locked():
                self._current = thread
                thread.turn.release()
            thread.os_thread.join(_LONGEST_TURN_S)

    def kill(self, rank: int) -> None:
        """Give no turn to the threads of a rank any more, as after the death of its process."""
        for thread in self._threads:
            thread.is_dead = thread.is_dead or thread.rank == rank

    def pause(self, rank: int, seconds: float) -> None:
        """Give no turn to the threads of a rank for a while, as if its process had stopped."""
        for thread in self._threads:
            if thread.rank == rank:
                thread.wakes_s = max(thread.wakes_s, self.now_s + seconds)

    def wakes_s(self, rank: int) -> float:
        """Return the time until which a rank is stopped."""
        return max((thread.wakes_s for thread in self._threads if thread.rank == rank), default=0.0)

    def call_at(self, at_s: float, event: Callable[[], None]) -> None:
        """Call `event`, which must not block, at a virtual time."""
        heappush(self._events, (at_s, next(self._numbers), event))

    def call_at_turn(self, number: int, event: Callable[[], None]) -> None:
        """Call `event`, which must not block, before the turn with this number."""
        self._events_at_turns[number] = event

    def living_threads(self) -> list[SimulatedThread]:
        """Return the threads that have not ended, and whose ranks live."""
        return [thread for thread in self._threads if not thread.is_done and not thread.is_dead]

    # For simulated primitives.

    @property
    def current(self) -> SimulatedThread | None:
        """The thread that runs, if it is the caller; None for a thread outside of the simulation."""
        running = self._current
        return running if running is not None and running.os_thread is threading.current_thread() else None

    def start(self, name: str, rank: int, function: Callable[[], object]) -> SimulatedThread:
        """Start a thread. It runs later."""

        def work() -> None:
            thread.turn.acquire()
            try:
                if not self._ends:
                    function()
            except Ended:
                pass
            finally:
                thread.is_done = True
                if not self._ends:
                    self._give_turn(thread)

        if self._ends:
            raise Ended
        thread = SimulatedThread(name, rank, work)
        self._threads.append(thread)
        thread.os_thread.start()
        return thread

    def block(self, is_ready: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Block the calling thread until `is_ready`, for at most `timeout_s`; return whether it is.

        Other threads may run even if it is ready at once. A thread outside of the simulation never blocks.
        """
        thread = self.current
        if thread is None:
            return is_ready()
        if self._ends:
            raise Ended
        thread.is_ready = is_ready
        begin_s = self.now_s
        thread.deadline_s = begin_s + timeout_s
        self._give_turn(thread)
        if self.recorder is not None and self.now_s > begin_s:
            self.recorder(thread, begin_s, _waiting_code())
        return is_ready()

    def _give_turn(self, thread: SimulatedThread | None) -> None:
        """Let the next thread run, and wait for the next turn of `thread`, unless it is done."""
        self.num_turns += 1
        following: SimulatedThread | None = None
        try:
            following = self._next_thread()
        except Exception as error:  # of an event: it must not be raised in the thread that happens to give up its turn
            self._failure = error
        chosen = "nobody" if following is None else f"{following.rank} {following.name}"
        self.digest.update(f"{self.now_s!r} {chosen}\n".encode())
        if following is not thread or following is None:
            self._current = following
            (self._end if following is None else following.turn).release()
            if thread is None or thread.is_done:
                return
            thread.turn.acquire()
        if self._ends:
            raise Ended

    def _next_thread(self) -> SimulatedThread | None:
        """Return a ready thread. If none is ready, advance the time. None at the end, or if none will ever be ready."""
        if (event := self._events_at_turns.pop(self.num_turns, None)) is not None:
            event()
        while not self._is_over():  # an event may end the last rank
            living = self.living_threads()
            now_s = self.now_s
            awake = [thread for thread in living if thread.wakes_s <= now_s]
            self._num_turns_now += 1
            if self._num_turns_now > _MOST_TURNS_AT_ONCE:
                self._failure = Deadlock(f"threads run again and again while no time passes:\n{self.stacks()}")
                return None
            if ready := [thread for thread in awake if thread.deadline_s <= now_s or thread.is_ready()]:
                return self.random.choice(ready) if len(ready) > 1 else ready[0]
            event_s = self._events[0][0] if self._events else math.inf
            asleep_s = [thread.wakes_s for thread in living if thread.wakes_s > now_s]
            next_s = min([event_s, *asleep_s, *(thread.deadline_s for thread in awake)])
            if next_s > self._limit_s:
                when = f"after {self._limit_s:g} s" if next_s < math.inf else "for ever"
                self._failure = Deadlock(f"threads wait {when}:\n{self.stacks()}")
                return None
            self._num_turns_now = 0
            self.now_s = max(now_s, next_s)
            while self._events and self._events[0][0] <= self.now_s:
                heappop(self._events)[2]()
        return None

    def stacks(self) -> str:
        """Return the stack of every thread that has not ended, without the frames of the simulation."""
        frames = sys._current_frames()
        texts = []
        for thread in self.living_threads():
            frame = frames.get(thread.os_thread.ident or 0)
            stack = traceback.extract_stack(frame) if frame is not None else []
            lines = traceback.format_list([entry for entry in stack if not _is_of_scheduling(entry)])
            texts.append(f"{thread.name} of rank {thread.rank}:\n{''.join(lines)}")
        return "\n".join(texts)


def _is_of_scheduling(entry: traceback.FrameSummary) -> bool:
    return entry.filename.startswith(_HERE) or entry.filename == threading.__file__


def _waiting_code() -> str:
    """Return the function of the package, or of the user, that waits."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
