"""The network of a simulation: links with a rate and a latency, and the transport over them."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from torchbagua.simulation.scheduler import Scheduler
from torchbagua.transport.base import Abilities, Members, Transport, TransportError

Key = tuple[int, int, int]
"""Sender, receiver and tag of a message. Ranks are those of the job."""


@dataclass
class Channel:
    """The messages and ends of one group's transports.

    Attributes:
        arrived: messages that have arrived, the oldest first.
        joined: the ranks that have opened the group.
        closed: the ranks that are known to have closed their end.
    """

    arrived: dict[Key, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    joined: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)


class Network:
    """Links between ranks. A rank sends one message after the other, and each arrives after a latency.

    Args:
        scheduler: of the simulation.
        rate: the bytes per second that a rank sends.
        latency_s: of every message.

    Attributes:
        rates: the rate of each rank, which may change.
        cut: pairs of sender and receiver, whose messages are lost.
    """

    def __init__(self, scheduler: Scheduler, rate: float, latency_s: float) -> None:
        self.scheduler = scheduler
        self.rates: dict[int, float] = defaultdict(lambda: rate)
        self.cut: set[tuple[int, int]] = set()
        self._latency_s = latency_s
        self._channels: dict[int, Channel] = {}
        self._free_s: dict[int, float] = defaultdict(float)

    def open_transport(self, members: Members) -> "SimulatedTransport":
        """Return a transport of these members: the `transport` of a `BaguaProcessGroup`."""
        # The members share a store, with which the first of them names their channel.
        number = int(members.store.compare_set("channel", "", str(len(self._channels))))
        return SimulatedTransport(self, self._channels.setdefault(number, Channel()), members)

    def send(self, channel: Channel, key: Key, tensor: torch.Tensor, done: Callable[[], None]) -> None:
        """Send a message. Reads the tensor when its last byte leaves, and then calls `done`."""
        sender, receiver, _ = key
        begin_s = max(self.scheduler.now_s, self._free_s[sender])
        self._free_s[sender] = begin_s + tensor.nbytes / self.rates[sender]

        def leave() -> None:
            message = tensor.detach().clone()
            if (sender, receiver) not in self.cut:
                self.scheduler.call_at(self._arrival_s(), lambda: channel.arrived[key].append(message))
            done()

        self.scheduler.call_at(self._free_s[sender], leave)

    def close(self, channel: Channel, rank: int) -> None:
        """Close a rank's end. The members are notified after its last message has arrived."""
        sent_s = max(self.scheduler.now_s, self._free_s[rank])
        self.scheduler.call_at(sent_s + self._latency_s, lambda: channel.closed.add(rank))

    def kill(self, rank: int) -> None:
        """End a rank as the death of its process does: the kernel closes its connections."""
        for channel in self._channels.values():
            self.close(channel, rank)
        self.scheduler.kill(rank)

    def _arrival_s(self) -> float:
        return self.scheduler.now_s + self._latency_s


class SimulatedTransport(Transport):
    """Sends messages between CPUs through a `Network`, without collectives, so that sums have rank order."""

    name = "simulated"
    abilities = Abilities(frozenset({"cpu"}))

    def __init__(self, network: Network, channel: Channel, members: Members) -> None:
        self._network = network
        self._channel = channel
        self._ranks = members.global_ranks
        self._rank = members.global_ranks[members.rank]
        self._timeout_s = members.timeout.total_seconds()
        self._sending: dict[tuple[int, int], list[bool]] = {}
        self._receiving: dict[tuple[int, int], torch.Tensor] = {}
        self._is_closed = [False]  # shared with twins

    def open(self) -> None:
        self._channel.joined.add(self._rank)
        missing = self._wait(lambda: self._channel.joined >= set(self._ranks), set(self._ranks))
        if missing:
            absent = sorted(set(self._ranks) - self._channel.joined)
            raise TransportError(f"ranks {absent} did not open the group: {missing}")

    def connect(self, peers: Iterable[int] | None) -> None:
        if self._rank not in self._channel.joined:
            self.open()

    def twin(self) -> "SimulatedTransport":
        self.connect(None)
        twin = copy.copy(self)
        twin._sending, twin._receiving = {}, {}
        return twin

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._check_open(peer)
        is_sent = self._sending[peer, tag] = [False]
        key = (self._rank, self._ranks[peer], tag)
        self._network.send(self._channel, key, tensor, lambda: is_sent.__setitem__(0, True))

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._check_open(peer)
        self._receiving[peer, tag] = tensor

    def wait_send(self, peer: int, tag: int) -> None:
        is_sent = self._sending.pop((peer, tag), None)
        if is_sent is not None and (failure := self._wait(lambda: is_sent[0], {self._ranks[peer]})):
            raise TransportError(failure, peer)

    def wait_receive(self, peer: int, tag: int) -> None:
        tensor = self._receiving.pop((peer, tag), None)
        if tensor is None:
            return
        arrived = self._channel.arrived[self._ranks[peer], self._rank, tag]
        if failure := self._wait(lambda: bool(arrived), {self._ranks[peer]}):
            raise TransportError(failure, peer)
        message = arrived.popleft()
        if message.nbytes != tensor.nbytes:
            raise TransportError(f"received {message.nbytes} bytes, expected {tensor.nbytes}", peer)
        tensor.copy_(message)

    def abort(self) -> None:
        if not self._is_closed[0]:
            self._is_closed[0] = True
            self._network.close(self._channel, self._rank)

    def _check_open(self, peer: int) -> None:
        if self._is_closed[0]:
            raise TransportError("the group is closed", peer)

    def _wait(self, is_done: Callable[[], bool], peers: set[int]) -> str | None:
        """Wait, and return the reason if it fails: a closed end, or the timeout."""

        def has_ended() -> bool:
            return is_done() or self._is_closed[0] or bool(self._channel.closed & peers)

        in_time = self._network.scheduler.block(has_ended, self._timeout_s)
        if is_done():
            return None
        if self._is_closed[0]:
            return "the group is closed"
        return "Connection closed by peer" if in_time else f"timed out after {self._timeout_s:g} s"
