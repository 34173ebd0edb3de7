"""Exchanges, in each of which every rank of a group sends a tensor to each of its peers and receives one from each.

The exchanges of two means may overlap. Without overlap, the links are idle between two means, while ranks decode the
last bytes of one mean and encode the first bytes of the next.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from torchbagua.observe.events import Details
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator

# Exchanges of different operations, and of different pieces, may be in flight at the same time.
_TAGS = {"all_to_all": 0, "all_gather": 1, "peer_exchange": 2, "agreement": 3}

# While one round is in flight, the transport already has the tensors of the next one, so that no link waits for a CPU.
_MAX_ROUNDS = 2

# 5 Gbit/s. Exchanges over faster links, such as those between ranks of one machine, wait for CPUs and not for links.
_FAST_LINK_BYTES_PER_S = 0.625e9

# The largest number of pieces in which a mean sends its chunks. The piece numbers of consecutive parts differ by this.
_MAX_PIECES = 2

# One mean is in flight, and a second one has begun.
_NUM_PARTS = 2


def tag_of(operation: str, piece: int) -> int:
    """Return the tag of a message."""
    return _TAGS[operation] + piece * len(_TAGS)


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

    Args:
        pipeline: the pipeline of the exchanges that are in flight together, over the communicator whose ranks exchange.
        operation: "all_to_all"; "all_gather" if a rank sends the same tensor to all others; "peer_exchange" between a
            subset of the ranks; "agreement" for small numbers.
        receives: the tensors to fill, by the rank that sends. This rank's entry, and empty tensors, are not written.
        bucket: the name of the bucket, in events and errors.
        turns: the (target, source) of each turn, with no rank twice in either position; by default all others, around
            the ring.
        counts: the contents of the messages; by default, messages are tensors that are not encoded.
        piece: distinguishes exchanges of one operation that are in flight at the same time, or differ in length.

    Attributes:
        targets: the ranks to send to, in the order of turns.
        rounds: the turns that are in flight together: all turns in one round, or one turn in each round.
        is_one_at_a_time: whether turns run one at a time.

    Raises:
        CommunicationError: a peer disconnected.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        operation: str,
        receives: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        bucket: str,
        turns: Sequence[tuple[int, int]] | None = None,
        counts: ElementCounts | None = None,
        piece: int = 0,
    ) -> None:
        self._pipeline = pipeline
        self._communicator = communicator = pipeline.communicator
        self._operation = operation
        self._receives = receives
        self._bucket = bucket
        self._counts = counts
        self._tag = tag_of(operation, piece)
        self._purpose = f"{operation} of {bucket}"
        is_with_all = turns is None
        if turns is None:
            distances = range(1, communicator.size)
            turns = [(communicator.rank_after(distance), communicator.rank_before(distance)) for distance in distances]
        self.targets = [target for target, _ in turns]
        self._sources = sources = [source for _, source in turns]
        self._posts_messages = pipeline.posts_messages
        self.is_one_at_a_time = (
            len(turns) > 1
            and self._posts_messages
            and max(receives[source].nbytes for source in sources) > SMALL_MESSAGE_BYTES
            and min(communicator.link_bytes_per_s[source] for source in sources) < _FAST_LINK_BYTES_PER_S
        )
        self.rounds = [[turn] for turn in turns] if self.is_one_at_a_time else [turns] if turns else []
        self._num_expected = 0
        if self._posts_messages:
            communicator.connect(None if is_with_all else self._peers(turns), self._purpose, pipeline.device)
            pipeline.add(self)

    def _peers(self, turns: Sequence[tuple[int, int]]) -> Iterable[int]:
        """Return the ranks to connect: those with data for or from this rank. Both ranks of a pair list each other."""
        if self._counts is not None and isinstance(self._counts.sent, Mapping):  # turns may include ranks without data
            return itertools.chain(self._counts.sent, self._counts.received)
        return itertools.chain.from_iterable(turns)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to send a tensor to each of `targets`, in this order.

        Args:
            tensors: an iterable that computes each tensor when the exchange draws it, shortly before it is sent. That
                may be after this method has returned, if the turn comes later.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        if self._posts_messages:
            self._pipeline.send(self, iter(tensors))
        else:
            self._all_to_all(dict(zip(self.targets, tensors, strict=False)))  # `tensors` may be infinite

    def arrivals(self) -> Iterator[int]:
        """Wait for the tensors from other ranks, and yield each rank when its tensor is there, in the order of turns.

        Exchanges of one pipeline call this in the order in which they send. In stream order, no host waits: later work
        on the current stream runs after the tensor has arrived.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        if not self._posts_messages:
            yield from self._sources
            return
        for turns in self.rounds:
            self._pipeline.wait_for_sends()
            for index, (_, source) in enumerate(turns, 1):
                with self._span("receive", source, self._receives[source]):
                    self._communicator.wait("receiving from", source, tag=self._tag, purpose=self._purpose)
                if index == len(turns):
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

    def post_receives(self, number: int) -> None:
        """Post the receives of the rounds up to `number` that are not posted yet. Their senders may now send."""
        while self._num_expected <= number < len(self.rounds):
            for _, source in self.rounds[self._num_expected]:
                tensor = self._receives[source]
                self._communicator.post("receiving from", source, tensor, tag=self._tag, purpose=self._purpose)
            self._num_expected += 1

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
        return self._communicator.message_span(phase, peer, details, on_host=self._posts_messages)


class Pipeline:
    """The exchanges that are in flight together over one communicator. All ranks have the same exchanges.

    Exchanges send their rounds in the order in which they call `Exchange.send`. Rounds of one turn are in flight one at
    a time. The tensor of the next round is computed meanwhile, and sent when the current round has arrived, before the
    caller decodes that. Other rounds are in flight two at a time, and each of their tensors is sent as soon as it is
    computed. So no link waits for a CPU, and at most two messages are in flight to a peer.

    Args:
        communicator: the communicator whose ranks exchange.
        device: the device of all tensors, of the same type on all ranks.

    Attributes:
        communicator, device: the arguments.
        posts_messages: whether tensors are sent by messages; otherwise each exchange is one collective.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self.posts_messages = communicator.posts_messages(device)
        self._expected: list[Exchange] = []  # peers may send these already; this rank does not yet
        self._to_send: deque[_Round] = deque()
        self._computed: deque[torch.Tensor] = deque()  # tensors of the first round to send, if computed ahead
        self._to_arrive: deque[_Round] = deque()
        self._to_leave: deque[tuple[_Round, list[Span]]] = deque()

    def add(self, exchange: Exchange) -> None:
        """Post the receives of an exchange; if its turns run one at a time, only after earlier exchanges complete."""
        self._expected.append(exchange)
        if not exchange.is_one_at_a_time:
            exchange.post_receives(0)
        self._post_receives()

    def send(self, exchange: Exchange, tensors: Iterator[torch.Tensor]) -> None:
        """Queue the tensors of an exchange behind those of earlier exchanges."""
        self._expected.remove(exchange)
        self._to_send.extend(_Round(exchange, number, tensors) for number in range(len(exchange.rounds)))
        self._advance()

    def end_round(self, exchange: Exchange) -> None:
        """Continue after all tensors of a round have arrived. Exchanges wait for their arrivals in order."""
        ended = self._to_arrive.popleft()
        assert ended.exchange is exchange
        self._advance()

    def wait_for_sends(self) -> None:
        """Wait for the sends of all rounds whose receives are complete."""
        while len(self._to_leave) > len(self._to_arrive):
            round, spans = self._to_leave.popleft()
            for (target, _), span in zip(round.turns, spans, strict=True):
                round.exchange.wait_for_send(target)
                span.end()

    def _advance(self) -> None:
        self._post_receives()
        while self._to_send:
            following, in_flight = self._to_send[0], self._to_arrive
            is_alone = following.exchange.is_one_at_a_time or (in_flight and in_flight[0].exchange.is_one_at_a_time)
            if len(in_flight) >= (1 if is_alone else _MAX_ROUNDS):
                if not self._computed:
                    self._computed.extend(itertools.islice(following.tensors, len(following.turns)))
                return
            self.wait_for_sends()
            self._send(self._to_send.popleft())

    def _post_receives(self) -> None:
        """If no round is in flight, post the receives of the next round."""
        if self._to_arrive:
            return
        if self._to_send:
            self._to_send[0].exchange.post_receives(self._to_send[0].number)
        elif self._expected:
            self._expected[0].post_receives(0)

    def _send(self, round: "_Round") -> None:
        spans = []
        for target, _ in round.turns:
            tensor = self._computed.popleft() if self._computed else next(round.tensors)
            spans.append(round.exchange.post_send(target, tensor))
        self._to_arrive.append(round)
        self._to_leave.append((round, spans))


class _Round(NamedTuple):
    exchange: Exchange
    number: int
    tensors: Iterator[torch.Tensor]

    @property
    def turns(self) -> Sequence[tuple[int, int]]:
        return self.exchange.rounds[self.number]


def exhaust(steps: Iterator[None]) -> None:
    """Run a generator to its end."""
    for _ in steps:
        pass


class OverlappingMean(ABC):
    """A mean that may begin while another overlapping mean is in flight.

    A call runs it from beginning to end.
    """

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        exhaust(self.steps(x_N, out_N))

    @abstractmethod
    def may_begin(self) -> bool:
        """Return whether `steps` reaches its first yield without blocking, whatever other ranks do."""

    @abstractmethod
    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when it has begun, and then at each point at which the next mean may begin.

        It yields nothing if it runs alone. Ranks may begin the next mean at different yields, or not at all.
        """


class Overlap:
    """The state that the means over one communicator share: a pipeline, and parts, which alternate.

    Args:
        communicator: a communicator over all ranks that run these means.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pipeline: Pipeline | None = None
        self._num_means = 0
        self._parts_in_flight: set[int] = set()

    def next_part(self) -> int:
        """Return the part for another mean, see `RankChunks`. Consecutive means have different parts.

        All ranks construct the same means in the same order, so the messages of a mean have the same piece numbers on
        all ranks.
        """
        self._num_means += 1
        return (self._num_means - 1) % _NUM_PARTS * _MAX_PIECES

    def is_in_flight(self, part: int) -> bool:
        """Return whether a mean of this part is in flight."""
        return part in self._parts_in_flight

    def begin(self, part: int, device: torch.device) -> Pipeline:
        """Register one more mean, of tensors on `device`, and return the pipeline of all means that are in flight."""
        if self._pipeline is None or (not self._parts_in_flight and self._pipeline.device != device):
            self._pipeline = Pipeline(self._communicator, device)
        self._parts_in_flight.add(part)
        return self._pipeline

    def end(self, part: int) -> None:
        """Record that the mean of this part is complete."""
        self._parts_in_flight.remove(part)
