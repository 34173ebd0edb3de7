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
    "detach",  # detaching forms the last mean of the weights; after the last step
]

TRAINING_PHASES: frozenset[Phase] = frozenset({"step", "backward", "wait", "apply", "detach"})

_NO_VALUES: Mapping[str, float] = MappingProxyType({})


class CommEvent(NamedTuple):
    """One phase of communication, or of the training step around it, on one rank.

    Times are those of `time.perf_counter_ns` in this process.

    Attributes:
        phase: what happened: one of the phases in the table below.
        start_ns: when it began.
        end_ns: when it ended.
        step: the step in which it ended: how many optimizer steps there were since `attach`. A step that a GradScaler
            skips is part of the next one. What an algorithm starts at the end of a step, to run beside the next one,
            is part of the next one. Without `attach`, averaged backward passes are counted.
        algorithm: the class name of the algorithm.
        operation: the exchange that it is part of: "all_to_all", "all_gather", "all_reduce" (over NCCL),
            "peer_exchange", or "agreement" for small numbers.
        bucket: the name of the bucket that it served; for an agreement, what that is about.
        scope: the group that it ran over: "world", "intra_node" or "inter_node". With " of replicas" after it, it ran
            over `attach`'s replicate_group.
        ranks: the members of that group, as ranks of the group that trains; or of the replicas.
        peers: the rank that a message goes to or comes from. In "reduce", the peer if the mean is taken with a single
            one.
        message: the number of the message among those between these two ranks in this group, the same on both.
        num_elements: how many elements of the averaged tensors it is about; 0 for an agreement.
        raw_bytes: what these elements take uncompressed.
        wire_bytes: what these elements take on the wire: the payload that is handed to the transport, without headers.
        values: what "measure" found, by name; in "apply", how old the averaged weights are.
    """

    phase: Phase
    start_ns: int
    end_ns: int
    step: int = 0
    algorithm: str = ""
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

    @property
    def duration_ns(self) -> int:
        """How long it took, in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for each element; 0 without elements."""
        return 8 * self.wire_bytes / self.num_elements if self.num_elements else 0.0

    @property
    def bytes_sent(self) -> int:
        """`wire_bytes` if the phase is "send", else 0."""
        return self.wire_bytes if self.phase == "send" else 0

    @property
    def bytes_received(self) -> int:
        """`wire_bytes` if the phase is "receive", else 0."""
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
    """What a `Trace` is told of the run when it starts.

    Attributes:
        id: the same on all ranks, and on no other run.
        algorithm: the class name of the algorithm.
        description: the algorithm with its arguments.
        rank: the rank whose events they are.
        nodes: the number of each rank's node.
        settings: hyperparameters and environment, by name.
        board: where ranks leave texts for each other; None if the run was read from a file.
        clock_offsets: what to add to this rank's clock for rank 0's: an entry for each comparison of clocks. Grows
            during the run.
        failures: which observers have failed, and why. Grows during the run.
    """

    id: str
    algorithm: str
    description: str
    rank: int
    nodes: tuple[int, ...]
    settings: Mapping[str, str]
    board: Board | None
    clock_offsets: list[ClockOffset] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """How many ranks train together."""
        return len(self.nodes)


class Observer(Protocol):
    """Any object with a method `on_comm`. It is told of every phase, for `attach(..., observers=[...])`.

    Events arrive at the end of the training step in which the phase ended, and on a GPU when it has come to that end.
    Events that are pending arrive in `Attachment.summary`, in `abort` of asynchronous averaging, and in detach.
    Training waits meanwhile, so be quick. Calls may come from several threads, one at a time. An observer that raises
    is dropped, with a warning. For more, such as the begin and the end of the run, write a subclass of `Trace`.
    """

    def on_comm(self, event: CommEvent) -> None:
        """Take note of a phase that has ended."""
        ...


class TraceError(RuntimeError):
    """A trace cannot go on; the message says all that there is to say, and no traceback is shown."""


class Trace:
    """An observer that is also told of the run. A subclass overrides the methods that it needs.

    Attributes:
        compares_clocks: True to have the ranks compare their clocks. All do so if a trace of any rank asks for it.
    """

    compares_clocks = False

    def check(self) -> None:
        """Raise ValueError if the trace cannot serve another run. Called before it is attached."""

    def on_start(self, run: Run) -> None:
        """Take note of the run, before the first event."""

    def samples(self, step: int) -> bool:
        """Return whether values, quantisation errors for instance, are to be measured in this step."""
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
