"""The data that observers receive about communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import torch

Phase = Literal[
    # on the lane
    "bucket",  # all work on a bucket; contains the next five phases, except for agreements, which serve no bucket
    "encode",  # the codec encodes values into bytes
    "receive",  # the lane waits for a message
    "reduce",  # received data are summed
    "decode",  # the codec decodes bytes into values
    "measure",  # sampled values are computed, for observers only
    # on the network
    "send",  # from passing a message to the transport until it is known to be sent; meanwhile the lane continues
    # on the training thread
    "step",  # from the end of one `optimizer.step` to the end of the next; contains the next three phases
    "backward",  # from the first gradient until autograd has computed the last one; with `attach` only
    "wait",  # training blocks until the lane is done: the exposed part of communication
    "apply",  # averaged weights are written into the module
    "detach",  # detach computes the last mean of the weights; after the last step
    # on the training thread, in the first step after a change of the membership, see torchbagua.elastic
    "notice",  # from the last finished step until this rank has noticed the change
    "agree",  # the ranks agree on the next members
    "open",  # they open the process group
    "share",  # they compare their states, and ranks that lack the newest one receive it
]

CHANGE_PHASES: tuple[Phase, ...] = ("notice", "agree", "open", "share")
TRAINING_PHASES: frozenset[Phase] = frozenset({"step", "backward", "wait", "apply", "detach", *CHANGE_PHASES})

Timestamp = int | torch.cuda.Event
"""`time.perf_counter_ns`, or a position in a stream, whose time is unknown until the GPU has reached it."""

_NO_VALUES: Mapping[str, float] = MappingProxyType({})


class CommEvent(NamedTuple):
    """One phase of communication, or of the training step around it, on one rank.

    Times are values of `time.perf_counter_ns` in this process.

    Attributes:
        phase: the phase, one of those in the table below.
        start_ns: when the phase began.
        end_ns: when the phase ended.
        step: the step in which the phase ended: the number of optimizer steps since `attach`. A step that a GradScaler
            skips is part of the next step. Work that an algorithm starts at the end of a step, to run concurrently with
            the next step, is part of the next step. Without `attach`, averaged backward passes are counted.
        algorithm: the class name of the algorithm.
        operation: the exchange that the phase is part of: "all_to_all", "all_gather", "all_reduce" (over NCCL),
            "peer_exchange", or "agreement" for small numbers.
        bucket: the name of the bucket; for an agreement, its subject.
        scope: the group of the operation: "world", "intra_node" or "inter_node". The suffix " of replicas" means
            `attach`'s replicate_group.
        ranks: the members of that group, as ranks of the training group, or as ranks of the replicas.
        peers: the rank to which a message is sent or from which it is received. In "reduce", the peer if the mean is
            taken with a single peer.
        message: the number of the message among the messages between these two ranks in this group, the same on both.
        num_elements: the number of elements of the averaged tensors in the phase; 0 for an agreement.
        raw_bytes: the uncompressed size of these elements.
        wire_bytes: the size of these elements on the wire: the payload passed to the transport, without headers.
        values: the values that "measure" computed, by name; in "apply", the age of the averaged weights.
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
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire per element; 0 without elements."""
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
    """The details of a phase: the fields of `CommEvent` from `operation` on, in order; see there."""

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
    """The offset that a rank adds to its clock to get rank 0's, in ns.

    Attributes:
        own_ns: when the offset was measured, on the rank's own clock.
        offset_ns: the offset.
        error_ns: the largest possible error of the offset.
    """

    own_ns: int
    offset_ns: int
    error_ns: int


class Board(Protocol):
    """Slots in which every rank publishes texts for the others, without waiting for any rank."""

    def put(self, slot: int, text: str) -> None:
        """Replace this rank's text in `slot`."""
        ...

    def get(self, slot: int) -> list[str] | None:
        """Return all ranks' texts in `slot`, in rank order; None if a rank has not published one yet."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """The description of a run that a `Trace` receives when the run starts.

    Attributes:
        id: the same on all ranks, and unique to the run.
        algorithm: the class name of the algorithm.
        description: the algorithm with its arguments.
        rank: the rank of the events.
        nodes: the node number of each rank.
        settings: hyperparameters and environment, by name.
        board: the board on which ranks publish texts for each other; None if the run was read from a file.
        clock_offsets: the offsets from this rank's clock to rank 0's, one for each comparison of clocks. Grows during
            the run.
        failures: the observers that failed, and their errors. Grows during the run.
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
        """The number of ranks that train together."""
        return len(self.nodes)


class Observer(Protocol):
    """Any object with a method `on_comm`, which is called for every phase. For `attach(..., observers=[...])`.

    Events arrive at the end of the training step in which the phase ended; on a GPU, they arrive once the GPU has
    reached that end. Pending events arrive in `Attachment.summary`, in `abort` of asynchronous averaging, and in
    detach. Training waits for `on_comm`, so it should be quick. Several threads may call it, one at a time. An observer
    that raises is dropped, with a warning. To be notified of the start and the end of the run too, subclass `Trace`.
    """

    def on_comm(self, event: CommEvent) -> None:
        """Handle a phase that has ended."""
        ...


class TraceError(RuntimeError):
    """A trace cannot continue. The message is complete, so the warning shows no traceback."""


class Trace:
    """An observer that is also notified of the run. A subclass overrides the methods that it needs.

    Attributes:
        compares_clocks: True to compare the ranks' clocks. All ranks do so if a trace of any rank requests it.
    """

    compares_clocks = False

    def check(self) -> None:
        """Raise ValueError if the trace cannot serve another run. Called before it is attached."""

    def on_start(self, run: Run) -> None:
        """Handle the start of the run, before the first event."""

    def samples(self, step: int) -> bool:
        """Return whether to measure values in this step, such as quantization errors."""
        return False

    def on_comm(self, event: CommEvent) -> None:
        """Handle a phase that has ended."""

    def on_end(self) -> None:
        """Finish: no further events follow."""
