"""Runs ranks in a simulation: one thread each, over a simulated network, in virtual time."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.simulation.network import Network
from torchbagua.simulation.primitives import Primitives
from torchbagua.simulation.scheduler import Scheduler
from torchbagua.simulation.store import SimulatedStore

T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """What became of a rank: a value, an error, or neither if it died."""

    value: T | None = None
    error: BaseException | None = None
    is_done: bool = False


@dataclass(frozen=True)
class Rank:
    """A rank of a simulation, for the function that it runs.

    Attributes:
        number: the rank.
        size: the number of ranks.
        simulation: the run that it belongs to.
        torch_group: a group without backends.
    """

    number: int
    size: int
    simulation: "Simulation"
    torch_group: dist.ProcessGroup

    def group(self, nodes: list[int] | None = None) -> tb.BaguaProcessGroup:
        """Return a group over the simulated network. Collective."""
        return tb.BaguaProcessGroup(
            self.torch_group,
            nodes=nodes or [0] * self.size,
            timeout=self.simulation.timeout,
            transport=self.simulation.network.open_transport,
        )

    def compute(self, seconds: float) -> None:
        """Let virtual time pass, as a computation does."""
        _concurrency.sleep(seconds)


class Simulation:
    """One run of `size` ranks.

    Args:
        size: the number of ranks.
        seed: determines the order of all events.
        rate: the bytes per second that a rank sends.
        latency_s: of every message.
        timeout: of the ranks' groups.
        limit_s: a run that has not ended at this virtual time is a Deadlock.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        rate: float = 25e6,
        latency_s: float = 1e-4,
        timeout: timedelta = timedelta(seconds=30),
        limit_s: float = 1000.0,
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.limit_s = limit_s
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, rate, latency_s)
        self.dead: set[int] = set()
        self._store = SimulatedStore(self.scheduler, latency_s)

    def kill_at(self, at_s: float, rank: int) -> None:
        """Let a rank die at a virtual time."""

        def kill() -> None:
            self.dead.add(rank)
            self.network.kill(rank)

        self.scheduler.call_at(at_s, kill)

    def run(self, body: Callable[[Rank], T]) -> list[Outcome[T]]:
        """Run `body` on every rank, and return the outcome of each. Raises Deadlock."""
        outcomes: list[Outcome[T]] = [Outcome() for _ in range(self.size)]

        def run_rank(number: int) -> None:
            outcome = outcomes[number]
            try:
                store = dist.PrefixStore("group", self._store)
                group = dist.ProcessGroup(store, number, self.size)
                outcome.value = body(Rank(number, self.size, self, group))
            except Exception as error:
                outcome.error = error
                self.network.kill(number)  # its process ends
            outcome.is_done = True

        def is_over() -> bool:
            return all(outcome.is_done for rank, outcome in enumerate(outcomes) if rank not in self.dead)

        with _in_virtual_time(self.scheduler):
            for number in range(self.size):
                self.scheduler.start(f"rank {number}", number, partial(run_rank, number))
            self.scheduler.run(is_over, self.limit_s)
        return outcomes


@contextmanager
def _in_virtual_time(scheduler: Scheduler) -> Iterator[None]:
    replaced: dict[str, Any] = {}
    num_threads = torch.get_num_threads()
    collects = gc.isenabled()
    for name, value in Primitives(scheduler).replacements().items():
        replaced[name] = getattr(_concurrency, name)
        setattr(_concurrency, name, value)
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        for name, value in replaced.items():
            setattr(_concurrency, name, value)
        torch.set_num_threads(num_threads)
        if collects:
            gc.enable()
