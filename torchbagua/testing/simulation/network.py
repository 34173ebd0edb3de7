"""The network of a simulation: messages between ranks over the links of a cluster."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from torchbagua.testing.simulation.cluster import Cluster, Link, Streams
from torchbagua.testing.simulation.scheduler import Scheduler
from torchbagua.transport.base import TransportError, bytes_of

Key = tuple[int, int, int]
"""Sender, receiver and tag of a message. Ranks are those of the job."""

Take = Callable[[torch.Tensor], str | None]
"""Takes the bytes of a message, and returns None, or a description of its wrong length."""

MessageRecorder = Callable[[int, int, int, float, float], None]
"""Is notified of a message that has arrived: sender, receiver, bytes, and the times of its begin and its arrival."""


@dataclass
class Channel:
    """The messages and ends of one group's transports.

    Attributes:
        receives: for each receive that waits for a message, the function that takes it.
        arrived: messages that have arrived before their receive was posted, the oldest first.
        joined: the ranks that have begun to open the group.
        connected: pairs of a rank and a peer to which it is connected.
        closed: the ranks that are known to have closed their end.
        to_send: for each connection, a pair of sender and receiver, the messages that have not left, the oldest first.
        arrival_s: for each connection, the time at which its last message arrives.
    """

    receives: dict[Key, Take] = field(default_factory=dict)
    arrived: dict[Key, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    joined: set[int] = field(default_factory=set)
    connected: set[tuple[int, int]] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    to_send: dict[tuple[int, int], deque["Message"]] = field(default_factory=lambda: defaultdict(deque))
    arrival_s: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))

    def drop(self, rank: int) -> None:
        """Drop the messages of a rank that have not left, and the receives that it has posted."""
        for (sender, _), messages in self.to_send.items():
            if sender == rank:
                messages.clear()
        self.receives = {key: take for key, take in self.receives.items() if key[1] != rank}

    def unread(self) -> list[Key]:
        """Return the messages that were sent and not received."""
        return [key for key, messages in self.arrived.items() if messages]


@dataclass(eq=False)
class Message:
    """A message in flight. Its tensor is read when its last byte leaves; then `done` is called."""

    key: Key
    tensor: torch.Tensor
    done: Callable[[], None]
    begin_s: float = 0.0


class Network:
    """Connections between ranks. Each sends one message after the other, and all share the links of the cluster.

    Args:
        scheduler: of the simulation.
        cluster: the nodes and their links.

    Attributes:
        limits: the capacities of links that differ from the cluster's, in bytes per second; see `limit`.
        cut: pairs of sender and receiver, whose messages are lost.
        jitter_s: a message takes up to this much longer, as the seed determines. Messages of one connection keep their
            order.
        failing: for a rank, the number of the operation of its transports that fails.
        on_failure: is called when it fails.
        num_operations: the number of operations that each rank's transports have begun.
        wrong_lengths: descriptions of messages whose length differs from that of their receive. With gloo, such a
            message can end the process.
        recorder: is notified of messages; may be set before the run.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster) -> None:
        self.scheduler = scheduler
        self.cluster = cluster
        self.limits: dict[Link, float] = {}
        self.cut: set[tuple[int, int]] = set()
        self.jitter_s = 0.0
        self.failing: dict[int, int] = {}
        self.on_failure: Callable[[], None] = lambda: None
        self.num_operations: dict[int, int] = defaultdict(int)
        self.wrong_lengths: list[str] = []
        self.recorder: MessageRecorder | None = None
        self.channels: dict[int, Channel] = {}
        self._streams = Streams(lambda: scheduler.now_s, scheduler.call_at, self._capacity)

    def new_channel(self) -> int:
        """Create a channel, and return its number."""
        number = len(self.channels)
        self.channels[number] = Channel()
        return number

    def join(self, channel: Channel, rank: int, peers: set[int]) -> None:
        """Begin to connect a rank with its peers. Every connection takes its own time."""
        channel.joined.add(rank)
        for peer in sorted(peers & channel.joined - {rank}):
            for pair in ((rank, peer), (peer, rank)):
                connect = partial(channel.connected.add, pair)
                self.scheduler.call_at(self.scheduler.now_s + self._delay_s(), connect)

    def limit(self, sender: int, receiver: int, rate: float) -> None:
        """Limit the messages from one rank to another to a rate, in bytes per second, from now on."""
        self.limits["pair", sender, receiver] = rate
        self._streams.update()

    def send(self, channel: Channel, key: Key, tensor: torch.Tensor, done: Callable[[], None]) -> None:
        """Send a message after the earlier ones of its connection."""
        queue = channel.to_send[key[:2]]
        queue.append(Message(key, tensor, done))
        if len(queue) == 1:
            self._begin(channel, queue)

    def receive(self, channel: Channel, key: Key, take: Take) -> None:
        """Call `take` with the next message, now or when it arrives."""
        if channel.arrived[key]:
            self._pass(key, take, channel.arrived[key].popleft())
        else:
            channel.receives[key] = take

    def _pass(self, key: Key, take: Take, content: torch.Tensor) -> None:
        if (wrong := take(content)) is not None:
            sender, receiver, _ = key
            self.wrong_lengths.append(f"rank {receiver} {wrong} from rank {sender}")

    def _begin(self, channel: Channel, queue: deque[Message]) -> None:
        message = queue[0]
        message.begin_s = self.scheduler.now_s
        sender, receiver, _ = message.key

        def leave() -> None:
            if not queue or queue[0] is not message:
                return  # dropped
            queue.popleft()
            if (sender, receiver) not in self.cut:
                self._deliver(channel, message, bytes_of(message.tensor.detach()).clone())
            message.done()
            if queue:
                self._begin(channel, queue)

        self._streams.start(self.cluster.path(sender, receiver), message.tensor.nbytes, leave)

    def _deliver(self, channel: Channel, message: Message, content: torch.Tensor) -> None:
        """Let a message arrive, after those that left before it on the same connection."""
        sender, receiver, _ = message.key
        connection = sender, receiver
        arrival_s = max(self.scheduler.now_s + self._delay_s(), channel.arrival_s[connection])
        channel.arrival_s[connection] = arrival_s

        def arrive() -> None:
            if (take := channel.receives.pop(message.key, None)) is not None:
                self._pass(message.key, take, content)
            else:
                channel.arrived[message.key].append(content)
            if self.recorder is not None:
                self.recorder(sender, receiver, content.nbytes, message.begin_s, arrival_s)

        self.scheduler.call_at(arrival_s, arrive)

    def close(self, channel: Channel, rank: int) -> None:
        """Close a rank's end. The members are notified after the messages that have left."""
        channel.drop(rank)
        last_s = max(at_s for (sender, _), at_s in [*channel.arrival_s.items(), ((rank, rank), 0.0)] if sender == rank)
        closed_s = max(last_s, self.scheduler.now_s + self.cluster.latency_s)
        self.scheduler.call_at(closed_s, lambda: channel.closed.add(rank))

    def kill(self, rank: int) -> None:
        """End a rank as the end of its process does: the kernel closes its connections."""
        for channel in self.channels.values():
            self.close(channel, rank)
        self.scheduler.kill(rank)

    def count(self, rank: int, operation: str) -> None:
        """Count an operation of a rank's transports. Raises TransportError if it is the one that fails."""
        self.num_operations[rank] += 1
        if self.failing.get(rank) == self.num_operations[rank]:
            self.on_failure()
            raise TransportError(f"{operation} failed: operation {self.num_operations[rank]} of rank {rank}")

    def _delay_s(self) -> float:
        return self.cluster.latency_s + self.jitter_s * self.scheduler.random.random()

    def _capacity(self, link: Link) -> float:
        return min(self.cluster.capacity(link), self.limits.get(link, float("inf")))
