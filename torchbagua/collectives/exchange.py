"""Exchanges: in each, every rank of a group sends one tensor to each of its peers, and receives one from each."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from torchbagua.observe.events import Details
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator

# Exchanges of different operations, and of different pieces, may be under way at the same time.
_TAGS = {"all_to_all": 0, "all_gather": 1, "peer_exchange": 2, "agreement": 3}

# While a round is under way gloo already has what the next one sends, so that no link waits for a processor.
_ROUNDS_AHEAD = 2

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
    """Receives, which are posted when this is made unless turns come one at a time, and sends: see `run_stages`.

    In each turn a rank sends to one peer and receives from one; by default, in turn d, it sends to the rank d places
    after it and receives from the one d places before it. Where messages are long and not every link is known to be
    fast, turns come one at a time: the receive of a turn is posted when the data of the turn before is there. gloo
    holds a send back until its receive is posted, so every link carries one stream in each direction; more streams at a
    time took up to twice as long over a slow network. Otherwise what costs is how often ranks wait for each other, and
    all receives are posted when the exchange is made.

    Ranks need not agree on whether turns come one at a time: it decides when data moves, and not what moves.

    In stream order all of it is one all-to-all, for which no host waits.

    Args:
        communicator: whose ranks exchange.
        operation: "all_to_all"; "all_gather" where a rank sends the same tensor to all others; "peer_exchange" between
            some; "agreement" of small numbers.
        receives: tensors to fill, by the rank that sends; own entry, and empty ones, are left alone.
        bucket: what it serves, in events and errors.
        turns: (target, source) of each turn, no rank twice in either place; default: all others, around the ring.
        counts: what the messages hold; default: tensors as they are.
        piece: tells exchanges of one operation apart that are under way at the same time.

    Attributes:
        rounds: the turns that are under way together: all, or one.
        in_stream_order: whether the tensors are moved by one collective, in stream order.

    Raises:
        CommunicationError: a peer is gone.
    """

    def __init__(
        self,
        communicator: Communicator,
        operation: str,
        receives: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        bucket: str,
        turns: Sequence[tuple[int, int]] | None = None,
        counts: ElementCounts | None = None,
        piece: int = 0,
    ) -> None:
        self._communicator = communicator
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
        sources = [source for _, source in turns]
        self.in_stream_order = not all(communicator.posts_messages(receives[source].device) for source in sources)
        self.is_one_at_a_time = (
            len(sources) > 1
            and not self.in_stream_order
            and max(receives[source].nbytes for source in sources) > SMALL_MESSAGE_BYTES
            and min(communicator.link_bytes_per_s[source] for source in sources) < _FAST_LINK_BYTES_PER_S
        )
        self.rounds = [[turn] for turn in turns] if self.is_one_at_a_time else [list(turns)]
        self._num_posted = 0
        if not self.in_stream_order:
            communicator.connect(None if is_with_all else self._peers(turns), self._purpose)
        if not self.is_one_at_a_time:
            self.post_receives(1)

    def _peers(self, turns: Sequence[tuple[int, int]]) -> Iterable[int]:
        """Return the ranks that this one has something for, or that have something for it: they say the same of it."""
        if self._counts is not None and isinstance(self._counts.sent, Mapping):  # of some ranks, others in between
            return itertools.chain(self._counts.sent, self._counts.received)
        return itertools.chain.from_iterable(turns)

    def run(
        self, send: Callable[[int], torch.Tensor], on_received: Callable[[int], None] = lambda source: None
    ) -> None:
        """Run this exchange alone; see `Stage` and `run_stages`."""
        run_stages([Stage(self, send, on_received=on_received)])

    def post_receives(self, num_rounds: int) -> None:
        """Post the receives of the first rounds, where that is still to be done: their senders send from now on.

        Worth a call if the caller computes before it runs this. In stream order there is none.
        """
        while not self.in_stream_order and self._num_posted < num_rounds:
            for _, source in self.rounds[self._num_posted]:
                tensor = self._receives[source]
                self._communicator.post("receiving from", source, tensor, tag=self._tag, purpose=self._purpose)
            self._num_posted += 1

    def send(self, target: int, tensor: torch.Tensor) -> Span:
        """Start to send `tensor`, and return the phase that has begun."""
        span = self._span("send", target, tensor)
        span.begin()
        self._communicator.post("sending to", target, tensor, tag=self._tag, purpose=self._purpose)
        return span

    def wait_for_receive(self, source: int) -> None:
        """Wait for what `source` sends."""
        with self._span("receive", source, self._receives[source]):
            self._communicator.wait("receiving from", source, tag=self._tag, purpose=self._purpose)

    def wait_for_send(self, target: int) -> None:
        """Wait until `target` has got what is sent to it."""
        self._communicator.wait("sending to", target, tag=self._tag, purpose=self._purpose)

    def run_in_stream_order(self, send: Callable[[int], torch.Tensor], on_received: Callable[[int], None]) -> None:
        """Do all of it on the current stream, where the functions only launch kernels."""
        turns = self.rounds[0]
        sends = {target: send(target) for target, _ in turns}
        receives = {source: self._receives[source] for _, source in turns}
        nothing = next(iter(sends.values())).new_empty(0)
        everybody = range(self._communicator.size)

        def messages() -> list[Span]:
            spans = [self._span("send", target, tensor) for target, tensor in sends.items()]
            return spans + [self._span("receive", source, tensor) for source, tensor in receives.items()]

        received = [receives.get(rank, nothing) for rank in everybody]
        sent = [sends.get(rank, nothing) for rank in everybody]
        self._communicator.all_to_all(received, sent, self._purpose, messages)
        for source in receives:
            on_received(source)

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
        return self._communicator.message_span(phase, peer, details, on_host=not self.in_stream_order)


class Stage(NamedTuple):
    """An exchange, and what is computed around it.

    Attributes:
        exchange: the exchange.
        send: returns the tensor for a rank; called once for each, in the order in which they are sent.
        on_sent: called when it has been given to gloo, before `on_received`.
        on_received: called with the rank whose tensor has arrived.
        on_finished: called when all have arrived, after `on_received`.
        after: an earlier exchange, which must be finished before this one sends.
    """

    exchange: Exchange
    send: Callable[[int], torch.Tensor]
    on_sent: Callable[[], None] = lambda: None
    on_received: Callable[[int], None] = lambda source: None
    on_finished: Callable[[], None] = lambda: None
    after: Exchange | None = None


def run_stages(stages: Sequence[Stage]) -> None:
    """Run exchanges in this order, and wait until everything is sent and received. All ranks run the same ones.

    The functions of the stages compute while the rounds after theirs are under way. Sizes agree between the two sides
    of a pair, and may be zero.

    Raises:
        CommunicationError: a peer is gone, or did not take part within the group's timeout.
    """
    if any(stage.exchange.in_stream_order for stage in stages):
        for stage in stages:
            stage.exchange.run_in_stream_order(stage.send, stage.on_received)
            stage.on_sent()
            stage.on_finished()
        return
    rounds = [(stage, number) for stage in stages for number in range(len(stage.exchange.rounds))]
    finished: list[Exchange] = []
    outgoing = _Outgoing(rounds)
    for index, (stage, number) in enumerate(rounds):
        stage.exchange.post_receives(number + 1)
        outgoing.finish(index)  # so that no more than two messages are on their way to a peer
        outgoing.send(index + 1, finished)
        if any(one.exchange.is_one_at_a_time for one, _ in rounds[index : index + 2]):
            outgoing.compute_next(finished)
        else:
            outgoing.send(index + 2, finished)
        for _, source in stage.exchange.rounds[number]:
            stage.exchange.wait_for_receive(source)
            for following, next_number in rounds[index + 1 : index + 2]:
                following.exchange.post_receives(next_number + 1)
            stage.on_received(source)
        if number + 1 == len(stage.exchange.rounds):
            stage.on_finished()
            finished.append(stage.exchange)
    outgoing.finish(len(rounds))


class _Outgoing:
    """What rounds send, each tensor as soon as it is computed."""

    def __init__(self, rounds: Sequence[tuple[Stage, int]]) -> None:
        self._rounds = rounds
        self._num_sent = 0
        self._computed: deque[torch.Tensor] = deque()  # what the next round sends, where that is computed ahead
        self._on_the_way: deque[tuple[Exchange, int, Span]] = deque()  # with the peer
        self._num_finished = 0

    def send(self, num_rounds: int, finished: Sequence[Exchange]) -> None:
        """Send what the first rounds send, up to one that must come after an exchange that is not finished."""
        while self._num_sent < min(num_rounds, len(self._rounds)) and self._may_send(finished):
            stage, number = self._rounds[self._num_sent]
            for target, _ in stage.exchange.rounds[number]:
                tensor = self._computed.popleft() if self._computed else stage.send(target)
                self._on_the_way.append((stage.exchange, target, stage.exchange.send(target, tensor)))
            if number + 1 == len(stage.exchange.rounds):
                stage.on_sent()
            self._num_sent += 1

    def compute_next(self, finished: Sequence[Exchange]) -> None:
        """Compute what the next round sends, as far as that is possible now."""
        if self._num_sent < len(self._rounds) and self._may_send(finished):
            stage, number = self._rounds[self._num_sent]
            self._computed.extend(stage.send(target) for target, _ in stage.exchange.rounds[number])

    def finish(self, num_rounds: int) -> None:
        """Wait until what the first rounds send is there."""
        for stage, number in self._rounds[self._num_finished : num_rounds]:
            for _ in stage.exchange.rounds[number]:
                exchange, target, span = self._on_the_way.popleft()
                exchange.wait_for_send(target)
                span.end()
            self._num_finished += 1

    def _may_send(self, finished: Sequence[Exchange]) -> bool:
        """Return whether the next round need not wait for what others send."""
        after = self._rounds[self._num_sent][0].after
        return after is None or after in finished
