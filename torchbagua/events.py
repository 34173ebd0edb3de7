"""What observers are told about communication: data only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

Phase = Literal[
    # on the lane
    "bucket",  # all that is done for a bucket; the next five lie within, but for agreements, which serve no bucket
    "encode",  # values become bytes
    "receive",  # the lane waits for a message
    "reduce",  # what has been received is added up
    "decode",  # bytes become values
    "measure",  # sampled values are computed, for observers only
    # on the network
    "send",  # from when a message is handed to the transport until it is known to be gone; the lane goes on meanwhile
    # on the training thread
    "step",  # from the end of one `optimizer.step` to that of the next; the next three lie within
    "backward",  # from the first gradient until autograd has the last one; through `attach` only
    "wait",  # training stands still until the lane is done: this is the exposed part of communication
    "apply",  # averaged weights are brought into the module
]

_NO_VALUES: Mapping[str, float] = MappingProxyType({})


class CommEvent(NamedTuple):
    """One phase of communication on one rank, or of the training step that it is part of.

    Times are `time.perf_counter_ns` of this process.
    """

    phase: Phase
    start_ns: int
    end_ns: int
    step: int = 0
    """In which step it ended: optimizer steps since attach; behind the plain hook, averaged backward passes.

    One that a GradScaler skips is part of the next.
    """
    algorithm: str = ""
    """The class of the algorithm, by name."""
    operation: str = ""
    """The exchange that it is part of: "all_to_all", "all_gather", "all_reduce" (NCCL's), "peer_exchange"; of small
    numbers, "agreement"."""
    bucket: str = ""
    """The bucket that it served, by name; of an agreement, what it is about."""
    scope: str = ""
    """Which group it ran over: "world", "intra_node" or "inter_node"."""
    ranks: tuple[int, ...] = ()
    """The members of that group, as ranks of the group that trains."""
    peers: tuple[int, ...] = ()
    """The rank that a message goes to or comes from; of "reduce", the one peer, where a mean is taken with one."""
    message: int = 0
    """The number of a message among those between these two ranks in this group, the same on both."""
    num_elements: int = 0
    """Elements of the averaged tensors that it is about; 0 of an agreement."""
    raw_bytes: int = 0
    """What these take uncompressed."""
    wire_bytes: int = 0
    """What they take on the wire: payload as handed to the transport, without its headers."""
    values: Mapping[str, float] = _NO_VALUES
    """What "measure" found, by name; of "apply", how old the averaged weights are."""

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for an element; 0 where there is none."""
        return 8 * self.wire_bytes / self.num_elements if self.num_elements else 0.0

    @property
    def bytes_sent(self) -> int:
        """Wire bytes of a message that this rank has sent, else 0."""
        return self.wire_bytes if self.phase == "send" else 0

    @property
    def bytes_received(self) -> int:
        """Wire bytes of a message that this rank has received, else 0."""
        return self.wire_bytes if self.phase == "receive" else 0


class Details(NamedTuple):
    """What a phase is about: the fields of `CommEvent` from `operation` on, in their order; it says what they are."""

    operation: str = ""
    bucket: str = ""
    scope: str = ""
    ranks: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    message: int = 0
    num_elements: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    values: Mapping[str, float] = _NO_VALUES


class ClockOffset(NamedTuple):
    """What a rank has to add to its clock for rank 0's, in ns.

    Attributes:
        own_ns: when that was found, on its own clock.
        offset_ns: what to add.
        error_ns: how far off that may be at most.
    """

    own_ns: int
    offset_ns: int
    error_ns: int


class Board(Protocol):
    """Where every rank pins up a text for the others, without waiting for anybody."""

    def put(self, slot: int, text: str) -> None:
        """Replace this rank's text in `slot`."""
        ...

    def get(self, slot: int) -> list[str] | None:
        """Return all ranks' texts in `slot`, in rank order; None where one has put none there yet."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trace is told of the run when it starts."""

    id: str
    """The same on all ranks, and on no other run."""
    algorithm: str
    """The class of the algorithm, by name."""
    description: str
    """The algorithm with its arguments."""
    rank: int
    nodes: tuple[int, ...]
    """Of each rank, the number of its node."""
    settings: Mapping[str, str]
    """Hyperparameters and environment, by name."""
    board: Board | None
    """None in what has been read from a file."""
    clock_offsets: list[ClockOffset] = field(default_factory=list)
    """One whenever ranks have compared their clocks; grows during the run."""
    failures: list[str] = field(default_factory=list)
    """Which observers have failed, and of what; grows during the run."""

    @property
    def num_ranks(self) -> int:
        """Ranks that train together."""
        return len(self.nodes)


class Observer(Protocol):
    """Hears of every phase, at the end of the training step in which it ended; training waits, so it should be quick.

    Calls may come from several threads, one at a time. An observer that raises is dropped, with a warning. One that
    wants to know more, of the run, its end or of sampled values, is a subclass of `Trace`.
    """

    def on_comm(self, event: CommEvent) -> None:
        """Take note of a phase that has ended."""
        ...


class TraceError(RuntimeError):
    """A trace cannot go on; the message says all that there is to say, and no traceback is shown."""


class Trace:
    """An observer that hears of the run as well; a subclass overrides what it needs.

    Attributes:
        compares_clocks: whether ranks have to compare their clocks; where one rank's traces ask for it, all do.
    """

    compares_clocks = False

    def check(self) -> None:
        """Raise ValueError where it cannot hear of another run; called before it is attached."""

    def on_start(self, run: Run) -> None:
        """Take note of the run, before the first event."""

    def samples(self, step: int) -> bool:
        """Return whether values are to be measured in this step."""
        return False

    def on_comm(self, event: CommEvent) -> None:
        """Take note of a phase that has ended."""

    def on_end(self) -> None:
        """Finish: there are no further events."""


def check_observers(owner: str, observers: Sequence[Observer]) -> None:
    """Raise TypeError or ValueError unless `observers` is a list of observers; `owner` is what the error names."""
    if not isinstance(observers, list | tuple):
        raise TypeError(f"{owner}: observers must be a list of objects with a method on_comm(event), got {observers!r}")
    for observer in observers:
        if isinstance(observer, type) or not callable(getattr(observer, "on_comm", None)):
            raise TypeError(f"{owner}: an observer must be an object with a method on_comm(event), got {observer!r}")
        if isinstance(observer, Trace):
            observer.check()
