"""Exchanges, in each of which every rank of a group sends a tensor to each of its peers and receives one from each.

The exchanges of two means may overlap. Without overlap, the links are idle between two means, while ranks decode the
last bytes of one mean and encode the first bytes of the next.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from torchbagua.observe.events import Details
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator, tag_of

# While one round is in flight, the transport already has the tensors of the next one, so that no link waits for a CPU.
_MAX_ROUNDS = 2

# 5 Gbit/s. Exchanges over faster links, such as those between ranks of one machine, wait for CPUs and not for links.
_FAST_LINK_BYTES_PER_S = 0.625e9

# The largest number of pieces in which a mean sends its chunks.
_MAX_PIECES = 2

# One mean is in flight, and a second one has begun.
_MAX_MEANS = 2


class ElementCounts(NamedTuple):
    """The contents of the messages of an exchange, for events: numbers of elements by rank.

    Attributes:
        sent, received: the numbers of elements.
        element_bytes: the size of an element before it is encoded; None if messages are not encoded.
    """

    sent: Sequence[int] | Mapping[int, int]
    received: Sequence[int] | Mapping[int, int]
    element_bytes: int | None = None


class Exchange:
    """One message to each of several ranks, and one message from each of several ranks.

        exchange.send(encode(target) for target in exchange.targets)
        for source in exchange.arrivals():
            decode(source)

    Encoding and decoding overlap with messages, of this exchange and of others in its pipeline. The two sides of a pair
    agree on the size of a message, which may be zero.

    In each turn a rank sends to one peer and receives from one peer. By default, in turn d, it sends to the rank d
    places after it and receives from the rank d places before it. If messages are long and at least one link is not
    known to be fast, turns run one at a time: a rank posts the receive of a turn when the data of the previous turn has
    arrived. A transport that posts messages delays a send until its receive is posted, so every link carries one stream
    in each direction. More streams at a time took up to twice as long over a slow network. Otherwise, the cost depends
    on how often ranks wait for each other, so all receives are posted when the exchange is constructed.

    Ranks need not agree on whether turns run one at a time. It affects when data is sent, and not which data is sent.

    If the communicator does not post individual messages, `send` is one all-to-all. In stream order, the host does not
    wait for it. A rank without turns calls it too, since the other ranks wait for all ranks.

    Attributes:
        targets: the ranks to send to, in the order of turns.
        tensors: the tensors to send, in this order; None before `send`.
        rounds: the turns that are in flight together: all turns in one round, or one turn in each round.
        is_one_at_a_time: whether turns run one at a time.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        operation: str,
        receives: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        bucket: str,
        turns: Sequence[tuple[int, int]] | None = None,
        counts: ElementCounts | None = None,
        channel: int = 0,
    ) -> None:
        self._pipeline = pipeline
        self._communicator = communicator = pipeline.communicator
        self._operation = operation
        self._receives = receives
        self._bucket = bucket
        self._counts = counts
        self._tag = tag_of(operation, channel)
        self._purpose = f"{operation} of {bucket}"
        peers = None if turns is None else self._peers(turns)
        if turns is None:
            distances = range(1, communicator.size)
            turns = [(communicator.rank_after(distance), communicator.rank_before(distance)) for distance in distances]
        self.targets = [target for target, _ in turns]
        self._sources = [source for _, source in turns]
        self.is_one_at_a_time = (
            len(turns) > 1
            and pipeline.posts_messages
            and max(receives[source].nbytes for source in self._sources) > SMALL_MESSAGE_BYTES
            and min(communicator.link_bytes_per_s[source] for source in self._sources) < _FAST_LINK_BYTES_PER_S
        )
        self.rounds = [[turn] for turn in turns] if self.is_one_at_a_time else [turns] if turns else []
        self.tensors: Iterator[torch.Tensor] | None = None
        if pipeline.posts_messages:
            communicator.connect(peers, self._purpose, pipeline.device)
            pipeline.add(self)

    def _peers(self, turns: Sequence[tuple[int, int]]) -> Iterable[int]:
        """Return the ranks to connect: those with data for or from this rank. Both ranks of a pair list each other."""
        if self._counts is not None and isinstance(self._counts.sent, Mapping):  # turns may include ranks without data
            return itertools.chain(self._counts.sent, self._counts.received)
        return itertools.chain.from_iterable(turns)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to send a tensor to each of `targets`, in this order."""
        if self._pipeline.posts_messages:
            self.tensors = iter(tensors)
            self._pipeline.advance()
        else:
            self._all_to_all(dict(zip(self.targets, tensors, strict=False)))  # `tensors` may be infinite

    def arrivals(self) -> Iterator[int]:
        """Wait for the tensors from other ranks, and yield each rank when its tensor is there, in the order of turns.

        Exchanges of one pipeline call this in the order in which they send. In stream order, no host waits: later work
        on the current stream runs after the tensor has arrived.
        """
        if not self._pipeline.posts_messages:
            yield from self._sources
            return
        for turns in self.rounds:
            self._pipeline.wait_for_sends()
            for turn in turns:
                source = turn[1]
                with self._span("receive", source, self._receives[source]):
                    self._communicator.wait("receiving from", source, tag=self._tag, purpose=self._purpose)
                if turn is turns[-1]:
                    self._pipeline.end_round(self)
                yield source

    def wait(self) -> None:
        """Wait until all tensors have arrived; see `arrivals`."""
        for _ in self.arrivals():
            pass

    def run(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send `tensors`, and wait until all are sent and received. Use this for the only exchange of a pipeline."""
        self.send(tensors)
        self.wait()
        self._pipeline.wait_for_sends()

    def post_receive(self, source: int) -> None:
        """Post the receive from `source`, which may then send."""
        tensor = self._receives[source]
        self._communicator.post("receiving from", source, tensor, tag=self._tag, purpose=self._purpose)

    def post_send(self, target: int, tensor: torch.Tensor) -> Span:
        """Start to send `tensor`, and return the span that has begun."""
        span = self._span("send", target, tensor)
        span.begin()
        self._communicator.post("sending to", target, tensor, tag=self._tag, purpose=self._purpose)
        return span

    def wait_for_send(self, target: int) -> None:
        """Wait until `target` has received its tensor."""
        self._communicator.wait("sending to", target, tag=self._tag, purpose=self._purpose)

    def _all_to_all(self, sends: dict[int, torch.Tensor]) -> None:
        if self._communicator.size == 1:
            return
        receives = {source: self._receives[source] for source in self._sources}
        sent_first = next(iter(sends.values()), None)
        empty = torch.empty(0, device=self._pipeline.device) if sent_first is None else sent_first.new_empty(0)
        all_ranks = range(self._communicator.size)

        def messages() -> list[Span]:
            spans = [self._span("send", target, tensor) for target, tensor in sends.items()]
            return spans + [self._span("receive", source, tensor) for source, tensor in receives.items()]

        received = [receives.get(rank, empty) for rank in all_ranks]
        sent = [sends.get(rank, empty) for rank in all_ranks]
        self._communicator.all_to_all(received, sent, self._purpose, messages)

    def _span(self, phase: Literal["send", "receive"], peer: int, tensor: torch.Tensor) -> Span:
        if self._communicator.tracer.is_idle or not tensor.numel():  # empty messages are not sent
            return NO_SPAN
        if self._counts is None:
            num_elements = tensor.numel() if tensor.is_floating_point() else 0  # integers are agreed on
            raw_bytes = tensor.nbytes
        else:
            num_elements = (self._counts.sent if phase == "send" else self._counts.received)[peer]
            element_bytes = self._counts.element_bytes
            raw_bytes = tensor.nbytes if element_bytes is None else num_elements * element_bytes
        details = Details(
            self._operation, self._bucket, num_elements=num_elements, raw_bytes=raw_bytes, wire_bytes=tensor.nbytes
        )
        return self._communicator.message_span(phase, peer, details, on_host=self._pipeline.posts_messages)


class Pipeline:
    """The exchanges that are in flight together over one communicator. All ranks have the same exchanges.

    Exchanges send in the order of their construction, round by round. Rounds of one turn are in flight one at a time.
    The tensor of the next round is computed meanwhile, and sent when the current round has arrived, before the caller
    decodes that. Other rounds are in flight two at a time, and each of their tensors is sent as soon as it is computed.
    So no link waits for a CPU, and at most two messages are in flight to a peer. The receives of a round are posted
    when its exchange is constructed, or, if its turns run one at a time, when no earlier round is in flight.

    Attributes:
        communicator, device: the arguments.
        posts_messages: whether tensors are sent by messages; otherwise each exchange is one collective.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self.posts_messages = communicator.posts_messages(device)
        # A round goes from one to the next. Peers may send a round that is still to be sent here.
        self._to_send: deque[_Round] = deque()
        self._in_flight: deque[_Round] = deque()
        self._arrived: list[_Round] = []

    def add(self, exchange: Exchange) -> None:
        """Queue the rounds of an exchange, and post their receives, unless its turns run one at a time."""
        rounds = [_Round(exchange, turns) for turns in exchange.rounds]
        self._to_send.extend(rounds)
        if not exchange.is_one_at_a_time:
            for round in rounds:
                round.post_receives()
        self._post_next_receives()

    def advance(self) -> None:
        """Send the next rounds as far as they may be in flight, and compute the tensors of the one that must wait."""
        self._post_next_receives()
        while self._to_send and (tensors := self._to_send[0].exchange.tensors) is not None:
            following, in_flight = self._to_send[0], self._in_flight
            is_alone = following.exchange.is_one_at_a_time or (in_flight and in_flight[0].exchange.is_one_at_a_time)
            if len(in_flight) >= (1 if is_alone else _MAX_ROUNDS):
                following.compute(tensors)
                return
            self.wait_for_sends()
            following.send(tensors)
            in_flight.append(self._to_send.popleft())

    def end_round(self, exchange: Exchange) -> None:
        """Continue after all tensors of a round have arrived. Exchanges wait for their arrivals in order."""
        ended = self._in_flight.popleft()
        assert ended.exchange is exchange
        self._arrived.append(ended)
        self.advance()

    def wait_for_sends(self) -> None:
        """Wait for the sends of all rounds that have arrived."""
        while self._arrived:
            self._arrived.pop(0).wait_for_sends()

    def _post_next_receives(self) -> None:
        """Post the receives of the next round, if it has waited for earlier rounds and none is in flight."""
        if self._to_send and not self._in_flight:
            self._to_send[0].post_receives()


@dataclass
class _Round:
    """The turns of an exchange that are in flight together."""

    exchange: Exchange
    turns: Sequence[tuple[int, int]]
    are_receives_posted: bool = False
    computed: list[torch.Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def post_receives(self) -> None:
        if not self.are_receives_posted:
            self.are_receives_posted = True
            for _, source in self.turns:
                self.exchange.post_receive(source)

    def compute(self, tensors: Iterator[torch.Tensor]) -> None:
        """Compute the tensors ahead of `send`."""
        if not self.computed:
            self.computed = list(itertools.islice(tensors, len(self.turns)))

    def send(self, tensors: Iterator[torch.Tensor]) -> None:
        for (target, _), tensor in zip(self.turns, self.computed or tensors, strict=False):
            self.spans.append(self.exchange.post_send(target, tensor))

    def wait_for_sends(self) -> None:
        for (target, _), span in zip(self.turns, self.spans, strict=True):
            self.exchange.wait_for_send(target)
            span.end()


class Overlap:
    """The two-phase means over one communicator, of which one may begin while another is in flight.

    All ranks construct the same means in the same order. A mean has one *channel* for each piece, so that its messages
    and its scratch memory differ from those of the other mean in flight. Means take two sets of channels in turn, in
    the order of their construction. If two means that run one after the other have the same channels, they run apart.
    """

    _pipeline: Pipeline | None = None
    _num_means = 0

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._channels_in_flight: set[int] = set()

    def next_channel(self) -> int:
        """Return the first channel of the next mean, by which the methods below identify the mean."""
        self._num_means += 1
        return (self._num_means - 1) % _MAX_MEANS * _MAX_PIECES

    def may_begin(self, channel: int) -> bool:
        """Return whether a mean may begin: one is in flight on other channels, so the ranks are connected."""
        return bool(self._channels_in_flight) and channel not in self._channels_in_flight

    def begin(self, channel: int, device: torch.device) -> Pipeline:
        """Register a mean of tensors on `device`, and return the pipeline of all means that are in flight."""
        if self._pipeline is None or (not self._channels_in_flight and self._pipeline.device != device):
            self._pipeline = Pipeline(self._communicator, device)
        self._channels_in_flight.add(channel)
        return self._pipeline

    def end(self, channel: int) -> None:
        """Record that the mean is complete."""
        self._channels_in_flight.remove(channel)
