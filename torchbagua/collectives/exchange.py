"""An exchange: every rank of a group sends one tensor to each of its peers, and receives one from each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from torchbagua.collectives.communicator import SMALL_MESSAGE_BYTES, Communicator
from torchbagua.collectives.private_groups import all_to_all
from torchbagua.events import Details
from torchbagua.tracer import NO_SPAN, Span

# Exchanges of different operations may be under way at the same time.
_TAGS = {"all_to_all": 0, "all_gather": 1, "peer_exchange": 2, "agreement": 3}

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
    """Receives, which are posted when this is made unless turns come one at a time, and sends, which `run` makes.

    In each turn a rank sends to one peer and receives from one; by default, in turn d, it sends to the rank d places
    after it and receives from the one d places before it. Where messages are long and not every link is known to be
    fast, turns come one at a time: the receive of a turn is posted when the data of the turn before is there. gloo
    holds a send back until its receive is posted, so every link carries one stream in each direction; more streams at a
    time took up to twice as long over a slow network. Otherwise what costs is how often ranks wait for each other, and
    all receives are posted when the exchange is made.

    Ranks need not agree on whether turns come one at a time: it decides when data moves, and not what moves.

    What NCCL moves goes in one all-to-all, for which no host waits.

    Args:
        communicator: whose ranks exchange.
        operation: "all_to_all"; "all_gather" where a rank sends the same tensor to all others; "peer_exchange" between
            some; "agreement" of small numbers.
        receives: tensors to fill, by the rank that sends; own entry, and empty ones, are left alone.
        bucket: what it serves, in events and errors.
        turns: (target, source) of each turn, no rank twice in either place; default: all others, around the ring.
        counts: what the messages hold; default: tensors as they are.

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
    ) -> None:
        self._communicator = communicator
        self._operation = operation
        self._receives = receives
        self._bucket = bucket
        self._counts = counts
        if turns is None:
            distances = range(1, communicator.size)
            turns = [(communicator.rank_after(distance), communicator.rank_before(distance)) for distance in distances]
        self._turns = turns
        sources = [source for _, source in turns]
        self._is_on_nccl = any(communicator.is_on_nccl(receives[source].device) for source in sources)
        self._is_one_at_a_time = (
            max((receives[source].nbytes for source in sources), default=0) > SMALL_MESSAGE_BYTES
            and min(communicator.link_bytes_per_s[source] for source in sources) < _FAST_LINK_BYTES_PER_S
        )
        self._num_posted = 0
        if not self._is_one_at_a_time:
            self._post_receives(len(turns))

    def post_first_receive(self) -> None:
        """Let the first sender send; `run` does so too. Worth a call where the caller computes before it runs."""
        self._post_receives(1)

    def run(
        self, send: Callable[[int], torch.Tensor], on_received: Callable[[int], None] = lambda source: None
    ) -> None:
        """Send `send(r)` to every peer r and wait until everything is sent and received.

        Both functions compute while other data is under way. Sizes agree between the two sides of a pair, and may be
        zero.

        Args:
            send: returns the tensor for a rank; called once for each, in the order in which they are sent.
            on_received: called with the rank whose tensor has arrived.

        Raises:
            CommunicationError: a peer is gone, or did not take part within the group's timeout.
        """
        if self._is_on_nccl:
            self._run_on_nccl(send, on_received)
            return
        communicator = self._communicator
        sends: list[Span] = []
        for index, (target, _) in enumerate(self._turns):
            self._post_receives(index + 1)
            tensor = send(target)
            sends.append(self._span("send", target, tensor))
            sends[-1].begin()
            communicator.post("sending to", target, tensor, tag=self._tag, purpose=self._purpose)
            if self._is_one_at_a_time:
                self._receive(index, on_received)
        if not self._is_one_at_a_time:
            for index in range(len(self._turns)):
                self._receive(index, on_received)
        for (target, _), span in zip(self._turns, sends, strict=True):
            communicator.wait("sending to", target, tag=self._tag, purpose=self._purpose)
            span.end()

    def _run_on_nccl(self, send: Callable[[int], torch.Tensor], on_received: Callable[[int], None]) -> None:
        """Do the same on the current stream, where the functions only launch kernels."""
        sends = {target: send(target) for target, _ in self._turns}
        receives = {source: self._receives[source] for _, source in self._turns}
        nothing = next(iter(sends.values())).new_empty(0)
        everybody = range(self._communicator.size)

        def messages() -> list[Span]:
            sent = [self._span("send", target, tensor) for target, tensor in sends.items()]
            return sent + [self._span("receive", source, tensor) for source, tensor in receives.items()]

        with self._communicator.launching(self._purpose, messages) as nccl:
            all_to_all(
                nccl,
                [receives.get(rank, nothing) for rank in everybody],
                [sends.get(rank, nothing) for rank in everybody],
            )
        for source in receives:
            on_received(source)

    @property
    def _tag(self) -> int:
        return _TAGS[self._operation]

    @property
    def _purpose(self) -> str:
        return f"{self._operation} of {self._bucket}"

    def _post_receives(self, num_turns: int) -> None:
        """Post the receives of the first turns, where that is still to be done; NCCL needs none."""
        if self._is_on_nccl:
            return
        while self._num_posted < min(num_turns, len(self._turns)):
            _, source = self._turns[self._num_posted]
            self._num_posted += 1
            self._communicator.post(
                "receiving from", source, self._receives[source], tag=self._tag, purpose=self._purpose
            )

    def _receive(self, index: int, on_received: Callable[[int], None]) -> None:
        """Finish the receive of one turn; the next sender sends while `on_received` computes."""
        _, source = self._turns[index]
        with self._span("receive", source, self._receives[source]):
            self._communicator.wait("receiving from", source, tag=self._tag, purpose=self._purpose)
        self._post_receives(index + 2)
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
        return self._communicator.message_span(phase, peer, details, on_nccl=self._is_on_nccl)
