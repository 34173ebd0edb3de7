"""Runs ranks in a simulation: one thread each, over a simulated network, in virtual time."""

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua._torch import group_without_effect
from torchbagua.observe.events import Observer
from torchbagua.testing.simulation.cluster import Cluster
from torchbagua.testing.simulation.ddp import SimulatedDdp
from torchbagua.testing.simulation.network import Network
from torchbagua.testing.simulation.primitives import Primitives
from torchbagua.testing.simulation.processors import Processors
from torchbagua.testing.simulation.scheduler import Deadlock, Ended, Scheduler
from torchbagua.testing.simulation.store import SimulatedStore
from torchbagua.testing.simulation.transport import transports_over

T = TypeVar("T")

_RUNS = threading.Lock()  # held during a run


@dataclass
class Outcome(Generic[T]):
    """The result of a rank.

    Attributes:
        value: what its function returned; None if it raised, or if the rank died.
        error: what its function raised; None if it did not.
        is_done: whether its function has returned or raised.
        ended_s: when it did, or when the rank died.
        threads: the names of the rank's threads that were left then.
    """

    value: T | None = None
    error: BaseException | None = None
    is_done: bool = False
    ended_s: float = 0.0
    threads: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """A rank of a simulation, for the function that it runs.

    Attributes:
        number: the rank.
        size: the number of ranks.
        simulation: the run that it belongs to.
        torch_group: a group whose collectives send nothing.
    """

    number: int
    size: int
    simulation: "Simulation"
    torch_group: dist.ProcessGroup

    def group(self, *, observers: Sequence[Observer] = ()) -> tb.BaguaProcessGroup:
        """Return a group over the simulated network: the `process_group` of `attach`. Collective."""
        return tb.BaguaProcessGroup(
            self.torch_group,
            nodes=self.simulation.cluster.nodes,
            timeout=self.simulation.timeout,
            observers=observers,
            transport=transports_over(self.simulation.network),
        )

    def ddp(self, module: torch.nn.Module, **arguments: Any) -> SimulatedDdp:
        """Return a DistributedDataParallel; see `SimulatedDdp`."""
        return SimulatedDdp(module, self.torch_group, self.compute, **arguments)

    def compute(self, seconds: float) -> None:
        """Let virtual time pass, as a computation of so many seconds on a core does. ValueError if it is negative."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"Rank.compute: seconds must be a finite number of at least 0, got {seconds}")
        self.simulation.processors.compute(self.number, seconds)


class Simulation:
    """One run of several ranks.

    Args:
        cluster: the machines, or a number of ranks on one node each.
        seed: determines the order of all events.
        timeout: of the ranks' groups.
        limit_s: a run that has not ended at this virtual time is a Deadlock.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Attributes:
        cluster, timeout: the same.
        size: the number of ranks.
        scheduler: has the virtual time, and calls events: `call_at`, `call_at_turn`.
        network: cuts links and limits their rates.
        processors: have the speed of each rank.
        store: may be slow, late or dead.
        dead: the ranks that `kill` has ended.
        ended: these, and the ranks whose function has returned or raised.
        foreign_threads: the names of threads that the ranks have started without `torchbagua._concurrency`, and that
            were left at the end.
        fault_s: when a fault has happened; None before.
    """

    def __init__(
        self,
        cluster: Cluster | int,
        seed: int,
        *,
        timeout: timedelta = timedelta(seconds=30),
        limit_s: float = 1000.0,
    ) -> None:
        if not isinstance(cluster, Cluster | int):
            raise TypeError(f"Simulation: cluster must be a Cluster or a number of ranks, got {cluster!r}")
        if not isinstance(seed, int):
            raise TypeError(f"Simulation: seed must be an int, got {seed!r}")
        self.cluster = Cluster.of_single_ranks(cluster) if isinstance(cluster, int) else cluster
        self.size = len(self.cluster.nodes)
        self.timeout = timeout
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, self.cluster)
        self.processors = Processors(self.scheduler, self.cluster)
        self.store = SimulatedStore(self.scheduler, self.cluster.latency_s)
        self.dead: set[int] = set()
        self.ended: set[int] = set()
        self.fault_s: float | None = None
        self.foreign_threads: list[str] = []
        self._has_run = False
        self._limit_s = limit_s
        self._outcomes: list[Outcome[Any]] = []

    def note_fault(self) -> None:
        """Note that a fault happens now."""
        self.fault_s = self.scheduler.now_s

    def kill(self, rank: int) -> None:
        """Let a rank die now; for `Scheduler.call_at` and `Scheduler.call_at_turn`."""
        if not self._outcomes[rank].is_done:
            self.dead.add(rank)
            self.ended.add(rank)
            self._outcomes[rank].ended_s = self.scheduler.now_s
            self.network.kill(rank)

    def run(self, body: Callable[[Rank], T]) -> list[Outcome[T]]:
        """Run `body` on every rank, and return the outcome of each.

        A rank that returns or raises ends like a process: exit handlers run, and then its connections close.

        Raises:
            Deadlock: a rank never ends. Contains the stacks of all threads, and the errors of ranks that have raised.
            RuntimeError: it has run before, or another simulation runs in this process.
            Exception: an event of the scheduler has raised it.
        """
        outcomes: list[Outcome[T]] = [Outcome() for _ in range(self.size)]
        self._outcomes = outcomes
        primitives = Primitives(self.scheduler)

        def run_rank(number: int) -> None:
            outcome = outcomes[number]
            try:
                group = group_without_effect(dist.PrefixStore("group", self.store), number, self.size)
                outcome.value = body(Rank(number, self.size, self, group))
            except Ended:
                raise
            except BaseException as error:  # also of sys.exit
                outcome.error = error
            outcome.is_done = True
            outcome.ended_s = self.scheduler.now_s
            own = self.scheduler.current
            outcome.threads = [
                thread.name for thread in self.scheduler.living_threads() if thread.rank == number and thread is not own
            ]
            primitives.exit(number)
            self.ended.add(number)
            self.network.kill(number)

        def is_over() -> bool:
            return len(self.ended) == self.size

        if self._has_run:
            raise RuntimeError("Simulation.run: a Simulation runs once; create another one")
        self._has_run = True
        threads = {*threading.enumerate()}
        with _replaced(primitives), self.processors.time_codecs():
            for number in range(self.size):
                self.scheduler.start(f"rank {number}", number, partial(run_rank, number))
            try:
                self.scheduler.run(is_over, self._limit_s)
            except Deadlock as error:
                raise Deadlock("\n".join([str(error), *_errors_of(outcomes)])) from None
            finally:
                primitives.close()
        self.foreign_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
        return outcomes


def _errors_of(outcomes: Sequence[Outcome[Any]]) -> list[str]:
    """Return the errors of the ranks that have raised."""
    return [f"rank {rank} has raised {end.error!r}" for rank, end in enumerate(outcomes) if end.error is not None]


@contextmanager
def _replaced(primitives: Primitives) -> Iterator[None]:
    """Replace threads, locks and clocks in the block. The order of events must not depend on torch's threads, or GC."""
    if not _RUNS.acquire(blocking=False):
        raise RuntimeError(
            "Simulation.run: another simulation runs in this process, and replaces its clocks and threads"
        )
    replaced: dict[str, Any] = {}
    num_threads = torch.get_num_threads()
    collects = gc.isenabled()
    for name, value in primitives.replacements().items():
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
        _RUNS.release()
