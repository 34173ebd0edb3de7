"""The ranks of a group, and the names of ranks and operations in events and errors."""

from collections import Counter
from typing import Literal

from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span, Tracer
from torchbagua.transport.base import Members
from torchbagua.transport.errors import CommunicationError


class NamedRanks:
    """The ranks of a group, for events and errors.

    Args:
        members: the ranks. Errors give their ranks in the user's group and their global ranks.
        scope: "world", "intra_node" or "inter_node".
        tracer: is notified of every phase of an operation over the group.

    Attributes:
        scope, tracer: as passed.
        ranks: the members, as ranks of the user's group.
        rank: the index of this rank in `ranks`.
    """

    def __init__(self, members: Members, scope: str, tracer: Tracer) -> None:
        self.scope = scope
        self.tracer = tracer
        self.ranks = members.ranks
        self.rank = members.rank
        self._global_ranks = members.global_ranks
        self._num_messages: Counter[tuple[str, int]] = Counter()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def rank_before(self, distance: int) -> int:
        """Return the rank `distance` places before this one, around the ring."""
        return (self.rank - distance) % self.size

    def rank_after(self, distance: int) -> int:
        """Return the rank `distance` places after this one, around the ring."""
        return (self.rank + distance) % self.size

    def span(self, phase: Phase, details: Details, *, on_host: bool = False) -> Span:
        """Return the span of an operation over this group; see `Tracer.span`. `details` need not name the group."""
        if self.tracer.is_idle:
            return NO_SPAN
        return self.tracer.span(phase, details._replace(scope=self.scope, ranks=self.ranks), on_host=on_host)

    def message_span(self, phase: Literal["send", "receive"], peer: int, details: Details, *, on_host: bool) -> Span:
        """Return the span of one message to or from `peer`. Both sides must create equally many message spans."""
        self._num_messages[phase, peer] = message = self._num_messages[phase, peer] + 1
        details = details._replace(peers=(self.ranks[peer],), message=message)
        return self.span(phase, details, on_host=on_host)

    def failure(self, purpose: str, cause: str, whom: str = "") -> CommunicationError:
        """Return the error for a `purpose` that failed on this rank. `whom` is, say, " receiving from rank 3"."""
        own = self.name_of(self.rank)
        return CommunicationError(f"torchbagua: {purpose} over the {self.scope} group failed on {own}{whom}: {cause}")

    def name_of(self, rank: int) -> str:
        """Return "rank 1" for errors, or "rank 1 (global rank 3)" if its global rank differs."""
        number, global_number = self.ranks[rank], self._global_ranks[rank]
        return f"rank {number}" + (f" (global rank {global_number})" if global_number != number else "")
