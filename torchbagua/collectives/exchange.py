"""Exchanges: in each, every rank of a group sends one tensor to each of its peers, and receives one from each."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from torchbagua.observe.events import Details
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator

# Exchanges of different operations, and of different pieces, may be under way at the same time.
_TAGS = {"all_to_all": 0, "all_gather": 1, "peer_exchange": 2, "agreement": 3}

# While one is under way the transport already has what the next one sends, so that no link waits for a processor.
_MOST_ROUNDS = 2

# 5 Gbit/s. What is faster, as between ranks of one machine, waits for processors and not for links.
_FAST_LINK_BYTES_PER_S = 0.625e9


class ElementCounts(NamedTuple):
    """What the messages of an exchange hold, for events: elements by rank.

    Attributes:
        sent, received: elements.
        element_bytes: what an element takes before it is encoded; None where messages are not encoded.
    """

    sent: Sequence[int] | Mapping[int, int]
    received: Sequence[int] | Mapping[int, int]
    element_bytes: int | None = None


class Exchange:
    """One message to each of some ranks, and one from each of some ranks.

        exchange.send(encode(target) for target in exchange.targets)
        for source in exchange.arrivals():
            decode(source)

    Encoding and decoding overlap with messages, of this exchange and of others in its pipeline. Sizes agree between the
    two sides of a pair, and may be zero.

    In each turn a rank sends to one peer and receives from one; by default, in turn d, it sends to the rank d places
    after it and receives from the one d places before it. If messages are long and not every link is known to be fast,
    turns come one at a time: the receive of a turn is posted when the data of the turn before is there. A transport
    that posts messages holds a send back until its receive is posted, so every link carries one stream in each
    direction; more streams at a time took up to twice as long over a slow network. Otherwise the cost is how often
    ranks wait for each other, and all receives are posted when the exchange is made.

    Ranks need not agree on whether turns come one at a time: it decides when data moves, and not what moves.

    If the communicator does not post messages one by one, `send` is one all-to-all: in stream order the host does not
    wait for it. A rank without turns calls it too, since the others wait for all.

    Args:
        pipeline: of the exchanges that are under way together, over the communicator whose ranks exchange.
        operation: "all_to_all"; "all_gather" if a rank sends the same tensor to all others; "peer_exchange" between
            some; "agreement" of small numbers.
        receives: tensors to fill, by the rank that sends; own entry, and empty ones, are left alone.
        bucket: what it serves, in events and errors.
        turns: (target, source) of each turn, no rank twice in either place; default: all others, around the ring.
        counts: what the messages hold; default: tensors as they are.
        piece: tells exchanges of one operation apart that are under way at the same time.

    Attributes:
        targets: the ranks to send to, in the order of turns.
        rounds: the turns that are under way together: all, or one.
        is_one_at_a_time: whether turns come one at a time.

    Raises:
        CommunicationError: a peer is gone.
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
        self._tag = _TAGS[operation] + piece * len(_TAGS)
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
        """Return the ranks that this one has something for, or that have something for it: they say the same of it."""
        if self._counts is not None and isinstance(self._counts.sent, Mapping):  # of some ranks, others in between
            return itertools.chain(self._counts.sent, self._counts.received)
        return itertools.chain.from_iterable(turns)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to send a tensor to each of `targets`, in this order.

        Args:
            tensors: computes each tensor when it is drawn, shortly before it is sent: after this has returned, if it is
                not its turn yet.

        Raises:
            CommunicationError: a peer is gone, or did not take part within the group's timeout.
        """
        if self._posts_messages:
            self._pipeline.send(self, iter(tensors))
        else:
            self._all_to_all(dict(zip(self.targets, tensors, strict=False)))  # they may be without end

    def arrivals(self) -> Iterator[int]:
        """Wait for what others send, and yield each rank when its tensor is there, in the order of turns.

        Exchanges of one pipeline do this in the order in which they send. In stream order no host waits: what the
        current stream does next, it does when the tensor is there.

        Raises:
            CommunicationError: a peer is gone, or did not take part within the group's timeout.
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
        """Send `tensors`, and wait until all is sent and received: for the only exchange of its pipeline."""
        self.send(tensors)
        self.wait()
        self._pipeline.wait_for_sends()

    def post_receives(self, number: int) -> None:
        """Post the receives of the rounds up to this one, unless they are posted: their senders send from now on."""
        while self._num_expected <= number < len(self.rounds):
            for _, source in self.rounds[self._num_expected]:
                tensor = self._receives[source]
                self._communicator.post("receiving from", source, tensor, tag=self._tag, purpose=self._purpose)
            self._num_expected += 1

    def post_send(self, target: int, tensor: torch.Tensor) -> Span:
        """Start to send `tensor`, and return the phase that has begun."""
        span = self._span("send", target, tensor)
        span.begin()
        self._communicator.post("sending to", target, tensor, tag=self._tag, purpose=self._purpose)
        return span

    def wait_for_send(self, target: int) -> None:
        """Wait until `target` has got what is sent to it."""
        self._communicator.wait("sending to", target, tag=self._tag, purpose=self._purpose)

    def _all_to_all(self, sends: dict[int, torch.Tensor]) -> None:
        if self._communicator.size == 1:
            return
        receives = {source: self._receives[source] for source in self._sources}
        sent_first = next(iter(sends.values()), None)
        nothing = torch.empty(0, device=self._pipeline.device) if sent_first is None else sent_first.new_empty(0)
        everybody = range(self._communicator.size)

        def messages() -> list[Span]:
            spans = [self._span("send", target, tensor) for target, tensor in sends.items()]
            return spans + [self._span("receive", source, tensor) for source, tensor in receives.items()]

        received = [receives.get(rank, nothing) for rank in everybody]
        sent = [sends.get(rank, nothing) for rank in everybody]
        self._communicator.all_to_all(received, sent, self._purpose, messages)

    def _span(self, phase: Literal["send", "receive"], peer: int, tensor: torch.Tensor) -> Span:
        if self._communicator.tracer.is_idle or not tensor.numel():  # which is not sent either
            return NO_SPAN
        if self._counts is None:
            num_elements = tensor.numel() if tensor.is_floating_point() else 0  # integers are what is agreed on
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
    """The exchanges over one communicator that are under way together. All ranks have the same ones.

    Their rounds are sent in the order in which they call `Exchange.send`. Rounds of one turn are under way one at a
    time; the next is computed meanwhile, and begins when all of this one has arrived, before the caller decodes that.
    Other rounds are under way two at a time, and each of their tensors is sent as soon as it is computed. So no link
    waits for a processor, and no more than two messages are on their way to a peer.

    Args:
        communicator: whose ranks exchange.
        device: of all tensors, the same type on all ranks.

    Attributes:
        communicator, device: the same.
        posts_messages: whether tensors are sent by messages; else each exchange is one collective.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self.posts_messages = communicator.posts_messages(device)
        self._expected: list[Exchange] = []  # of which peers may send already, and this rank does not
        self._to_send: deque[_Round] = deque()
        self._computed: deque[torch.Tensor] = deque()  # what the first of these sends, if that is computed ahead
        self._to_arrive: deque[_Round] = deque()
        self._to_leave: deque[tuple[_Round, list[Span]]] = deque()

    def add(self, exchange: Exchange) -> None:
        """Post the receives of an exchange, of turns that come one at a time when those before them are over."""
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
        """Go on after all of a round has arrived. An exchange waits for its arrivals when those before it have."""
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
            following, under_way = self._to_send[0], self._to_arrive
            is_alone = following.exchange.is_one_at_a_time or (under_way and under_way[0].exchange.is_one_at_a_time)
            if len(under_way) >= (1 if is_alone else _MOST_ROUNDS):
                if not self._computed:
                    self._computed.extend(itertools.islice(following.tensors, len(following.turns)))
                return
            self.wait_for_sends()
            self._send(self._to_send.popleft())

    def _post_receives(self) -> None:
        """If no round is under way, post the receives of the next one."""
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
