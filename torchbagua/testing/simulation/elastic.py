"""Elastic training in a simulation: a mailbox for each process, whose requests cross links, and groups over them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua._torch import group_without_effect
from torchbagua.elastic.members import WAITS, Mailboxes, Member, Membership
from torchbagua.testing.simulation.ddp import SimulatedDdp
from torchbagua.testing.simulation.run import Rank, Simulation
from torchbagua.testing.simulation.store import DEFAULT_TIMEOUT, as_bytes
from torchbagua.testing.simulation.transport import transports_over

T = TypeVar("T")

_RESEND_S = 0.2
_LOOK_EVERY_S = 0.01


class SimulatedMailbox(dist.Store):
    """A connection of one process to the mailbox of another.

    A request takes effect when it arrives. It is lost while the link is cut, as in TCP until it is sent again, and it
    waits while the other process is stopped. It fails if that process has ended, and so does the wait for the answer.
    """

    def __init__(
        self,
        simulation: Simulation,
        values: dict[str, bytes],
        asking: int,
        owner: int,
        count: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._count = count
        self._simulation = simulation
        self._values = values
        self._asking, self._owner = asking, owner

    def set(self, key: str, value: str | bytes) -> None:
        self._request(lambda: self._values.__setitem__(key, as_bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._request(lambda: self._values[key])

    def check(self, keys: Sequence[str]) -> bool:
        return self._request(lambda: self._values.keys() >= {*keys})

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

        return self._request(add)

    def wait(self, keys: Sequence[str], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        end_s = _concurrency.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if _concurrency.monotonic() > end_s:
                raise dist.DistStoreError(f"timed out after {timeout.total_seconds():g} s waiting for keys")
            _concurrency.sleep(_LOOK_EVERY_S)

    def has_extended_api(self) -> bool:
        return False

    def delete_key(self, key: str) -> bool:
        return self._request(lambda: self._values.pop(key, None) is not None)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        def replace() -> bytes:
            if self._values.get(key, b"") == as_bytes(expected):
                self._values[key] = as_bytes(desired)
            return self._values.get(key, as_bytes(expected))

        return self._request(replace)

    def _request(self, effect: Callable[[], T]) -> T:
        if self._asking == self._owner:
            return effect()
        self._count(self._asking)
        values, answers = list[T](), list[bool]()

        def arrive(is_up: bool) -> None:
            if is_up:
                values.append(effect())
            self._cross(self._owner, self._asking, answers.append)

        self._cross(self._asking, self._owner, arrive)
        self._simulation.scheduler.block(lambda: bool(answers))
        if not values:
            raise dist.DistNetworkError("the store has closed the connection")
        return values[0]

    def _cross(self, sender: int, receiver: int, arrive: Callable[[bool], object]) -> None:
        """Send a message: call `arrive` when it arrives, with whether the owner of the mailbox has not ended."""
        scheduler, network = self._simulation.scheduler, self._simulation.network

        def look() -> None:
            has_ended = self._owner in self._simulation.ended
            is_stopped = not has_ended and scheduler.wakes_s(self._owner) > scheduler.now_s
            if is_stopped or (sender, receiver) in network.cut:
                scheduler.call_at(scheduler.now_s + _RESEND_S, look)
            else:
                arrive(not has_ended)

        scheduler.call_at(scheduler.now_s + self._simulation.cluster.latency_s, look)


class PostOffice:
    """The mailboxes of all processes of a simulation.

    Args:
        replaces: of a process that is started in place of another, the number of that process.
        failing: the number of a process, and that of its request to another mailbox that fails.
    """

    def __init__(self, replaces: Mapping[int, int] | None = None, failing: tuple[int, int] = (-1, 0)) -> None:
        self.num_requests = Counter[int]()
        self.failing = failing
        self._replaces = replaces or {}
        self.values: dict[Member, dict[str, bytes]] = {}
        self._connections: list[SimulatedMailbox] = []  # torch does not keep the Python part of a store

    def member(self, number: int) -> Member:
        """Return the member of a process."""
        return Member(f"process{number}", "simulated", number, f"place {self._replaces.get(number, number)}")

    def open(self, rank: Rank) -> Mailboxes:
        """Return the mailboxes for a process, whose own is new."""
        own = self.member(rank.number)
        self.values[own] = {}
        return Mailboxes(own, self.connection(rank, own), lambda member: self._connect(rank, member))

    def connection(self, rank: Rank, member: Member) -> SimulatedMailbox:
        """Return a connection to a mailbox."""
        values = self.values[member]
        self._connections.append(SimulatedMailbox(rank.simulation, values, rank.number, member.port, self._count))
        return self._connections[-1]

    def _count(self, asking: int) -> None:
        """Count a request of a process to another, and fail it if it is to fail."""
        self.num_requests[asking] += 1
        if self.failing == (asking, self.num_requests[asking]):
            raise dist.DistNetworkError("the connection was reset")

    def _connect(self, rank: Rank, member: Member) -> dist.Store:
        store = self.connection(rank, member)
        try:
            store.check([])
        except dist.DistNetworkError as error:
            raise ConnectionRefusedError(str(error)) from error
        return store


class SimulatedMachine:
    """The process of a rank, for `torchbagua.elastic.run`: see `torchbagua.elastic.generations.Machine`.

    Args:
        rank: of the simulation.
        office: has the mailboxes of all processes.
        first: the processes that start together.
    """

    def __init__(self, rank: Rank, office: PostOffice, first: Sequence[int]) -> None:
        self._rank = rank
        self._office = office
        self._first = first
        self._group: tb.BaguaProcessGroup | None = None

    def meet(self) -> tuple[Mailboxes, Membership | None, Sequence[Member]]:
        mailboxes = self._office.open(self._rank)
        mailboxes.store.set("status", f"0 {WAITS}")
        _concurrency.sleep(0.01)
        first = tuple(map(self._office.member, self._first))
        return mailboxes, Membership(0, first) if mailboxes.own in first else None, first

    def store(self, membership: Membership) -> dist.Store:
        mailbox = self._office.connection(self._rank, membership.members[0])
        return dist.PrefixStore(f"generation/{membership.generation}", mailbox)

    def open_group(self, membership: Membership, rank: int) -> tb.BaguaProcessGroup:
        simulation, size = self._rank.simulation, len(membership.members)
        torch_group = group_without_effect(dist.PrefixStore("group", self.store(membership)), rank, size)
        self._group = tb.BaguaProcessGroup(
            torch_group,
            nodes=list(range(size)),
            timeout=simulation.timeout,
            transport=transports_over(simulation.network),
            global_ranks=[member.port for member in membership.members],
        )
        return self._group

    def wrap(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> SimulatedDdp:
        assert self._group is not None
        compute = self._rank.compute
        return SimulatedDdp(model, self._group.process_group, compute, init_sync=False, **arguments)

    def watch_hosts(self) -> None:
        """Do nothing: a link that is cut is noticed after the timeout."""

    def close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
