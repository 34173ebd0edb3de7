"""The transport of a simulation: messages between CPUs through a simulated network."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torchbagua.testing.simulation.network import Channel, Network
from torchbagua.transport.base import Abilities, Members, Transport, TransportError, TransportMaker, bytes_of
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.store_requests import SilentStoreError, StoreRequests


@dataclass(eq=False)
class Receive:
    """A receive that was posted.

    Attributes:
        tensor: the memory for the message.
        is_done: whether the message has arrived.
        failure: describes a message that has another length; None if there is none.
    """

    tensor: torch.Tensor
    is_done: bool = False
    failure: str | None = None

    def take(self, message: torch.Tensor) -> str | None:
        """Write a message to the tensor, or return that it has another length."""
        self.is_done = True
        if message.nbytes == self.tensor.nbytes:
            bytes_of(self.tensor).copy_(message)
        else:
            self.failure = f"received {message.nbytes} bytes, expected {self.tensor.nbytes}"
        return self.failure


class SimulatedTransport(Transport):
    """Sends messages through a `Network`, without collectives, so that sums have rank order.

    A message is written to the memory of its receive when it arrives, and not before.
    """

    name = "simulated"
    abilities = Abilities(frozenset({"cpu"}))

    def __init__(self, network: Network, channel: Channel, members: Members) -> None:
        self._network = network
        self._channel = channel
        self._ranks = members.global_ranks
        self._rank = members.global_ranks[members.rank]
        self._timeout_s = members.timeout.total_seconds()
        self._sending: dict[tuple[int, int], list[bool]] = {}
        self._receiving: dict[tuple[int, int], Receive] = {}
        self._is_closed = [False]  # shared with twins

    def open(self) -> None:
        self._network.count(self._rank, "opening a group")
        peers = set(self._ranks) - {self._rank}
        self._network.join(self._channel, self._rank, peers)
        expected = {(self._rank, peer) for peer in peers}
        if failure := self._wait(lambda: self._channel.connected >= expected, peers, fails_at_once=True):
            absent = sorted(peer for _, peer in expected - self._channel.connected) or sorted(
                self._channel.closed & peers
            )
            raise TransportError(f"no connection to ranks {absent}: {failure}")

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
        self._network.count(self._rank, "a send")
        is_sent = self._sending[peer, tag] = [False]
        key = (self._rank, self._ranks[peer], tag)
        self._network.send(self._channel, key, tensor, lambda: is_sent.__setitem__(0, True))

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._check_open(peer)
        self._network.count(self._rank, "a receive")
        receive = self._receiving[peer, tag] = Receive(tensor)
        self._network.receive(self._channel, (self._ranks[peer], self._rank, tag), receive.take)

    def wait_send(self, peer: int, tag: int) -> None:
        is_sent = self._sending.pop((peer, tag), None)
        if is_sent is None:
            return
        self._network.count(self._rank, "the wait for a send")
        if failure := self._wait(lambda: is_sent[0], {self._ranks[peer]}):
            raise TransportError(failure, peer)

    def wait_receive(self, peer: int, tag: int) -> None:
        receive = self._receiving.pop((peer, tag), None)
        if receive is None:
            return
        self._network.count(self._rank, "the wait for a receive")
        if failure := self._wait(lambda: receive.is_done, {self._ranks[peer]}):
            raise TransportError(failure, peer)
        if receive.failure is not None:
            raise TransportError(receive.failure, peer)

    def abort(self) -> None:
        if not self._is_closed[0]:
            self._is_closed[0] = True
            self._network.close(self._channel, self._rank)

    def _check_open(self, peer: int) -> None:
        if self._is_closed[0]:
            raise TransportError("the group is closed", peer)

    def _wait(self, is_done: Callable[[], bool], peers: set[int], *, fails_at_once: bool = False) -> str | None:
        """Wait, and return the reason if it fails: a closed end, or the timeout."""

        def has_ended() -> bool:
            return is_done() or self._is_closed[0] or bool(self._channel.closed & peers)

        in_time = self._network.scheduler.block(has_ended, self._timeout_s)
        if is_done() and not (fails_at_once and self._channel.closed & peers):
            return None
        if self._is_closed[0]:
            return "the group is closed"
        return "Connection closed by peer" if in_time else f"timed out after {self._timeout_s:g} s"


def transports_over(network: Network) -> TransportMaker:
    """Return a function that opens transports over a network: the `transport` of a `BaguaProcessGroup`."""

    def open_transport(members: Members) -> SimulatedTransport:
        # The members share a store, with which the first of them names their channel. Those of the others stay unused.
        requests = StoreRequests(members.store, members.timeout)
        try:
            number = int(requests.set_first("channel", str(network.new_channel())))
        except SilentStoreError as error:
            rank = members.global_ranks[members.rank]
            raise CommunicationError(f"torchbagua: opening a transport failed on rank {rank}: {error}") from error
        return SimulatedTransport(network, network.channels[number], members)

    return open_transport
