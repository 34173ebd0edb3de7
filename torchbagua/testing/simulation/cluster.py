"""The machines of a simulation: nodes, their network cards, the links between ranks, and the speed of processors."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

Link = Hashable

# A stream that would end within this time has ended: times are rounded.
_SHORTEST_S = 1e-9


@dataclass(frozen=True)
class Cluster:
    """The machines on which ranks run. Rates are in bytes per second, of each direction.

    Attributes:
        nodes: the node of each rank.
        rate: of a network card.
        num_cards: the network cards of a node, whose i-th rank uses card i modulo `num_cards`.
        memory_rate: of messages between two ranks of a node.
        latency_s: of a message.
        num_cores: the cores of a node, which its ranks share.
        encode_rate: of a codec, in bytes of the tensor, on one core.
        decode_rate: the same. Both apply to full precision too, which is copied.

    Raises:
        ValueError: an argument does not fit.
    """

    nodes: tuple[int, ...]
    rate: float = 25e6
    num_cards: int = 1
    memory_rate: float = 2e9
    latency_s: float = 1e-4
    num_cores: int = 8
    encode_rate: float = math.inf
    decode_rate: float = math.inf

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("rate", "memory_rate", "encode_rate", "decode_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Cluster: {name} must be positive, got {getattr(self, name)}")
        for name in ("num_cards", "num_cores"):
            if getattr(self, name) < 1:
                raise ValueError(f"Cluster: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Cluster: latency_s must be a finite number of at least 0, got {self.latency_s}")
        if not self.nodes:
            raise ValueError("Cluster: nodes must have an entry for each rank, got none")

    @classmethod
    def of_single_ranks(cls, size: int) -> "Cluster":
        """Return `size` nodes with one rank each."""
        return cls(tuple(range(size)))

    def path(self, sender: int, receiver: int) -> tuple[Link, ...]:
        """Return the links over which a message is sent."""
        pair = ("pair", sender, receiver)
        if self.nodes[sender] == self.nodes[receiver]:
            return (pair,)
        return (self._card("out", sender), pair, self._card("in", receiver))

    def capacity(self, link: Link) -> float:
        """Return the rate of a link, in bytes per second."""
        assert isinstance(link, tuple)
        if link[0] != "pair":
            return self.rate
        _, sender, receiver = link
        return self.memory_rate if self.nodes[sender] == self.nodes[receiver] else math.inf

    def _card(self, direction: str, rank: int) -> Link:
        place = self.nodes[:rank].count(self.nodes[rank])
        return (direction, self.nodes[rank], place % self.num_cards)


class Streams:
    """Streams of work over shared resources, such as messages over links, or computations on cores.

    Every stream uses all of its links at one rate. Streams that share a link get equal parts of it, and what one of
    them cannot use, the others get: max-min fairness, as long-lived TCP connections have it (Bertsekas and Gallager,
    "Data Networks", 6.5.2).
    """

    def __init__(
        self,
        now: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], None],
        capacity: Callable[[Link], float],
    ) -> None:
        self._now = now
        self._call_at = call_at
        self._capacity = capacity
        self._streams: list[_Stream] = []
        self._updated_s = 0.0
        self._version = 0

    def start(self, links: Sequence[Link], amount: float, done: Callable[[], None]) -> None:
        """Start to move `amount` over `links`; call `done` when it has moved."""
        self._advance()  # the earlier ones have moved at the earlier rates
        self._streams.append(_Stream(tuple(links), amount, done))
        self.update()

    def update(self) -> None:
        """Share the links again: a stream has begun or ended, or a capacity has changed."""
        self._advance()
        self._share()
        self._version += 1
        version = self._version
        end_s = min((stream.left / stream.rate for stream in self._streams if stream.rate > 0), default=math.inf)
        if end_s < math.inf:
            self._call_at(self._now() + end_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # the rates have changed
        self._advance()
        ended = [stream for stream in self._streams if stream.left <= stream.rate * _SHORTEST_S]
        self._streams = [stream for stream in self._streams if stream not in ended]
        self.update()
        for stream in ended:
            stream.done()

    def _advance(self) -> None:
        passed_s = self._now() - self._updated_s
        self._updated_s = self._now()
        if passed_s:
            for stream in self._streams:
                stream.left -= stream.rate * passed_s

    def _share(self) -> None:
        """Set all rates: fill the tightest link, fix the rates of its streams, and repeat with the rest."""
        unfixed = self._streams
        free = {link: self._capacity(link) for stream in unfixed for link in stream.links}
        while unfixed:
            users = {link: sum(link in stream.links for stream in unfixed) for link in free}
            rate, tightest = min(
                ((free[link] / num, index) for index, (link, num) in enumerate(users.items()) if num),
                default=(math.inf, -1),
            )
            link = list(users)[tightest] if tightest >= 0 else None
            fixed = [stream for stream in unfixed if link is None or link in stream.links]
            for stream in fixed:
                stream.rate = rate
                for own in stream.links:
                    free[own] -= rate
            unfixed = [stream for stream in unfixed if stream not in fixed]


class _Stream:
    def __init__(self, links: tuple[Link, ...], amount: float, done: Callable[[], None]) -> None:
        self.links = links
        self.left = amount
        self.rate = 0.0
        self.done = done
