"""The mean over all ranks, compressed or in full precision. `centralized_mean` selects it: begin with `TwoPhaseMean`.

The two-phase mean is a compressed reduce-scatter, then a compressed all-gather.

A flat tensor is cut into one chunk for each rank. A *piece* is the first half of every chunk, or the second half of
every chunk, if chunks are long; otherwise it is all chunks. Each piece has a *channel*, a number that separates its
messages and scratch memory from those of other pieces in flight; see `Overlap`.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk, or of its part in one piece.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchbagua.codecs.base import Compressor, Identity, TensorSpec, WireLayout
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.exchange import ElementCounts, Exchange, Overlap, Pipeline
from torchbagua.collectives.residuals import Residual
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator

if TYPE_CHECKING:
    from torchbagua.collectives.encoding_error import EncodingErrorProbe

# Wires by the rank that sent them, [R, W]. If the wire is the tensor, a list, since this rank's row is not copied.
Rows = Any


class Mean(Protocol):
    """Computes the mean (or sum) of a flat tensor over the ranks."""

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` to `out_N`, a tensor like it, and leave `x_N` unchanged; in place by default."""
        ...


class OverlappingMean(ABC):
    """A mean that may begin while another overlapping mean is in flight.

    A call runs it from beginning to end.
    """

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place."""
        for _ in self.run_overlapping(x_N, out_N):
            pass

    @abstractmethod
    def may_begin(self) -> bool:
        """Return whether a call may begin now, while another mean is in flight and only waits.

        Up to its first yield, `run_overlapping` then waits for no rank, except for earlier sends, for which the mean in
        flight is about to wait too. False if no mean is in flight: then a call needs no permission.
        """

    @abstractmethod
    def run_overlapping(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when it has begun, and then at each point at which the next mean may begin.

        It yields nothing if it runs alone. Ranks may begin the next mean at different yields, or not at all.
        """


class NodeGroups(Protocol):
    """The part of `BaguaProcessGroup` that collectives use: communicators over all ranks, within and between nodes.

    Attributes:
        rank, size: the number of this rank, and the number of ranks.
        num_shards: the smallest number of ranks on a node, and so the number of shards that every node can own.
        world: the communicator over all ranks.
        intra_node: the communicator over the ranks of this node; None with one node, or with one rank on each node.
        inter_node: the communicator over the ranks that own the same shard, one on each node; None likewise, and on
            ranks that own no shard.
    """

    rank: int
    size: int
    num_shards: int
    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None

    @property
    def device(self) -> torch.device:
        """The device for which the communicators were last prepared."""
        ...

    def mean_over_nodes(
        self,
        compressor: Compressor,
        spec: TensorSpec,
        divisor: float,
        intra_compressor: Compressor,
        residuals: TwoPhaseResiduals | None,
    ) -> Mean:
        """Return the function that sums within nodes, and then averages between nodes; see `centralized_mean`."""
        ...


def centralized_mean(
    group: NodeGroups,
    compressor: Compressor,
    spec: TensorSpec,
    *,
    hierarchical: bool,
    average: bool = True,
    intra_compressor: Compressor | None = None,
    residuals: TwoPhaseResiduals | None = None,
    overlap: Overlap | None = None,
) -> Mean:
    """Return the function that averages a flat tensor over `group`. Its result is bitwise equal on all ranks.

    In full precision and without messages, the function is the backend's all-reduce. That takes nodes into account
    already, so `hierarchical` has no effect. In a group of one rank, the mean is the tensor itself.

    One mean may begin while another one with the same `overlap` is in flight.
    """
    if group.size == 1:
        return _copy
    divisor = float(group.size) if average else 1.0
    intra_compressor = intra_compressor or Identity()
    is_of_nodes = hierarchical and group.intra_node is not None
    is_full = isinstance(compressor, Identity) and (isinstance(intra_compressor, Identity) or not is_of_nodes)
    if is_full and not group.world.posts_messages(spec.device):
        return AllReduceMean(group.world, spec, divisor)
    mean: Mean
    if is_of_nodes:
        mean = group.mean_over_nodes(compressor, spec, divisor, intra_compressor, residuals)
    else:
        mean = TwoPhaseMean(group.world, compressor, spec, divisor, residuals=residuals, overlap=overlap)
    if residuals is None:
        return mean
    return RedistributingMean(mean, residuals, group.intra_node if is_of_nodes else None, group.world, spec)


def _copy(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
    if out_N is not None:
        out_N.copy_(x_N)


class TwoPhaseMean(OverlappingMean):
    """Mean of a flat tensor: compressed reduce-scatter, then compressed all-gather (ScatterReduce, arXiv 2107.01499).

    Between CPUs, long chunks are sent in two pieces, so that a link carries one piece while the other is computed.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        divisor: float,
        *,
        residuals: TwoPhaseResiduals | None = None,
        start: int = 0,
        overlap: Overlap | None = None,
    ) -> None:
        self._overlap = overlap or Overlap(communicator)
        self._channel = self._overlap.next_channel()
        self._divisor = divisor
        self._residuals = residuals
        cuts = spec.even_cuts(communicator.size, compressor.block_elements)
        if residuals is not None:
            own = slice(*cuts[communicator.rank : communicator.rank + 2])
            residuals.assign_slices(
                sent=slice(start, start + spec.num_elements), mean=slice(start + own.start, start + own.stop)
            )
        num_pieces = 1
        if are_long(communicator, compressor, spec, cuts):
            num_pieces = 2
            cuts = spec.cuts_within(cuts, num_pieces, compressor.block_elements)
        self._pieces = RankChunks.in_pieces(communicator, compressor, spec, cuts, num_pieces, self._channel)

    def may_begin(self) -> bool:
        """Return whether another mean is in flight, between CPUs, on other channels."""
        return not self._pieces[0].are_coded_at_once and self._overlap.may_begin(self._channel)

    def run_overlapping(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when all chunks are queued, and then before each wait for a piece of means."""
        out_N = x_N if out_N is None else out_N
        residuals, divisor = self._residuals, self._divisor
        sent, mean = (None, None) if residuals is None else (residuals.sent, residuals.mean)
        pipeline = self._overlap.begin(self._channel, x_N.device)
        # Construct all of them now, so that their receives are posted early.
        scatters = [ReduceScatter(piece, x_N, pipeline, divisor=divisor, residual=sent) for piece in self._pieces]
        gathers = [AllGather(piece, out_N, pipeline) for piece in self._pieces]
        # 1. Queue each chunk for the rank that owns it. The pipeline has it encoded and sends it when its turn comes.
        for scatter in scatters:
            scatter.send()
        yield
        # 2. Decode all copies of the local chunk, sum them in rank order, divide, encode the mean, and send it to all.
        for scatter, gather in zip(scatters, gathers, strict=True):
            scatter.receive_encoded_mean(gather.own_wire, mean, out_N)
            gather.send()
        # 3. Decode all means, that of the local chunk too, so that results are bitwise equal on all ranks.
        for gather in gathers:
            yield  # everything that this mean sends is queued in the pipeline
            gather.receive()
        pipeline.wait_for_sends()
        self._overlap.end(self._channel)
        if residuals is not None:
            residuals.report(pipeline.communicator.tracer, self._pieces[0].spec.name)


class RedistributingMean(OverlappingMean):
    """A mean that first redistributes the residuals, if its bucket replaces others."""

    def __init__(
        self,
        mean: Mean,
        residuals: TwoPhaseResiduals,
        senders: Communicator | None,
        owners: Communicator,
        spec: TensorSpec,
    ) -> None:
        self._mean = mean
        self._residuals = residuals
        self._senders = senders
        self._owners = owners
        self._spec = spec

    def may_begin(self) -> bool:
        """Return whether the mean may begin, and no residuals wait for redistribution."""
        mean = self._mean
        return self._residuals.initial is None and isinstance(mean, OverlappingMean) and mean.may_begin()

    def run_overlapping(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean, and yield when the wrapped mean yields."""
        if (initial := self._residuals.initial) is not None:
            among = {name: self._owners if name == "mean" else self._senders for name in initial}
            self._residuals.load_whole({name: self._sum_over(among[name], x_N) for name, x_N in initial.items()})
        if isinstance(self._mean, OverlappingMean):
            yield from self._mean.run_overlapping(x_N, out_N)
        else:
            self._mean(x_N, out_N)

    def _sum_over(self, communicator: Communicator | None, x_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks. All ranks but one have zeros, so the sum is bitwise that rank's values."""
        if communicator is None:
            return x_N
        total_N = x_N.clone()  # a failure leaves `x_N` unchanged
        TwoPhaseMean(communicator, Identity(), self._spec, 1.0)(total_N)
        return total_N


def are_long(communicator: Communicator, compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]) -> bool:
    """Return whether the halves of the longest chunk are long messages between CPUs. The same on all ranks."""
    if _is_coded_at_once(communicator, spec) or not compressor.blocks_are_independent:
        return False
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    num_bytes = compressor.wire_bytes(longest, -(-longest // compressor.block_elements), spec.dtype)
    return num_bytes > 2 * SMALL_MESSAGE_BYTES


def _is_coded_at_once(communicator: Communicator, spec: TensorSpec) -> bool:
    return spec.device.type == "cuda" or not communicator.posts_messages(spec.device)


class RankChunks:
    """The chunks of a flat tensor, one for each rank, which owns it: all of them, or one piece.

    Attributes:
        communicator, compressor, spec: the arguments.
        rank: the number of this rank in the communicator.
        layout: the layout of all pieces.
        elements: the elements of the tensor, by owner.
        layouts: the layout of each owner's part as a separate tensor with a separate wire.
        own: the elements of the local part.
        are_sent_at_once: whether one collective sends all chunks, which are then padded to equal length. This is so if
            the communicator does not post individual messages.
        are_coded_at_once: whether one launch encodes or decodes all chunks, as on a GPU.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        cuts: Sequence[int],
        channel: int = 0,
        piece: int = 0,
        num_pieces: int = 1,
    ) -> None:
        self.communicator = communicator
        self.compressor = compressor
        self.spec = spec
        self.rank = communicator.rank
        self._channel = channel
        self._is_first = piece == 0
        self.are_sent_at_once = not (communicator.posts_messages(spec.device) or compressor.wire_is_tensor)
        self.are_coded_at_once = _is_coded_at_once(communicator, spec)
        self.layout = compressor.layout(spec, cuts, equal_bytes=self.are_sent_at_once)
        parts = range(piece, len(cuts) - 1, num_pieces)
        self.elements = [self.layout.elements[part] for part in parts]
        self.layouts = [self.layout.chunk(part) for part in parts]
        self._wire_bytes = [layout.num_bytes for layout in self.layouts]
        self.own = self.elements[self.rank]
        self._chunk_start = cuts[self.rank * num_pieces]
        self._lengths = [elements.stop - elements.start for elements in self.elements]
        own_lengths = [self._lengths[self.rank]] * communicator.size
        self._counts = {
            "all_to_all": ElementCounts(self._lengths, own_lengths, spec.dtype.itemsize),
            "all_gather": ElementCounts(own_lengths, self._lengths, spec.dtype.itemsize),
        }
        # Scratch memory by role, and views of its parts, which stay valid until the scratch memory changes.
        self._roles = f"wire {channel}", f"received {channel}"
        self._wire_W: torch.Tensor | None = None
        self._wires: Sequence[torch.Tensor] = []
        self._received_W: torch.Tensor | None = None

    @classmethod
    def in_pieces(
        cls,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        cuts: Sequence[int],
        num_pieces: int,
        channel: int = 0,
    ) -> list["RankChunks"]:
        """Return the pieces of a tensor's chunks, given the cuts of all pieces. The first one uses `channel`."""
        return [
            cls(communicator, compressor, spec, cuts, channel + piece, piece, num_pieces) for piece in range(num_pieces)
        ]

    @classmethod
    def of_rows(
        cls, communicator: Communicator, compressor: Compressor, row: TensorSpec, rows_each: int = 1
    ) -> "RankChunks":
        """Return the chunks of a tensor of equal rows. Each rank owns the same number of consecutive rows."""
        num_rows = rows_each * communicator.size
        whole = replace(row, segment_lengths=row.segment_lengths * num_rows)
        cuts = [rank * rows_each * row.num_elements for rank in range(communicator.size + 1)]
        return cls(communicator, compressor, whole, cuts)

    @property
    def within_chunk(self) -> slice:
        """The elements of the local part within the local chunk."""
        return slice(self.own.start - self._chunk_start, self.own.stop - self._chunk_start)

    def wire(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the wire of `x_N`: its own memory, or the communicator's scratch memory."""
        if self.compressor.wire_is_tensor:
            return x_N.view(torch.uint8)
        return self.communicator.scratch(self._roles[0], sum(self._wire_bytes), self.spec.device)

    def wires(self, wire_W: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a wire by owner."""
        if self.compressor.wire_is_tensor:  # it is the caller's memory; keep no views of it
            element_bytes = self.spec.dtype.itemsize
            return [wire_W[part.start * element_bytes : part.stop * element_bytes] for part in self.elements]
        if wire_W is not self._wire_W:
            self._wire_W, self._wires = wire_W, wire_W.split(self._wire_bytes)
        return self._wires

    def received(self) -> torch.Tensor:
        """Return the buffers for the local part from each rank, [R, W], in scratch memory."""
        size, own_bytes = self.communicator.size, self._wire_bytes[self.rank]
        received_W = self.communicator.scratch(self._roles[1], size * own_bytes, self.spec.device)
        if received_W is not self._received_W:
            self._received_W, self._received_RW = received_W, received_W.view(size, own_bytes)
        return self._received_RW

    def exchange(self, pipeline: Pipeline, operation: str, receives: Sequence[torch.Tensor]) -> Exchange:
        """Return the exchange of an operation, and post its receives."""
        counts = self._counts[operation]
        return Exchange(pipeline, operation, receives, self.spec.name, counts=counts, channel=self._channel)

    def all_to_all(self, received_RW: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Send each rank its part of `wire_W` and receive the local chunk from all, by one collective."""
        messages = partial(self._messages, "all_to_all")
        self.communicator.all_to_all_single(received_RW.view(-1), wire_W, f"all_to_all of {self.spec.name}", messages)

    def all_gather(self, wire_W: torch.Tensor, own_wire: torch.Tensor) -> None:
        """Send `own_wire`, the local part of `wire_W`, to all ranks and receive theirs, by one collective."""
        messages = partial(self._messages, "all_gather")
        self.communicator.all_gather_into_tensor(wire_W, own_wire, f"all_gather of {self.spec.name}", messages)

    def span(self, phase: Phase, operation: str, owner: int | None = None) -> Span:
        """Return a span of a phase of the work on the part of `owner`, or of all owners."""
        if self.communicator.tracer.is_idle:
            return NO_SPAN
        owners = range(self.communicator.size) if owner is None else [owner]
        num_elements = sum(self._lengths[rank] for rank in owners)
        wire_bytes = sum(self._wire_bytes[rank] for rank in owners)
        return self.communicator.span(phase, self._details(operation, num_elements, wire_bytes))

    @property
    def reports_error(self) -> bool:
        """Whether an observer samples this step, and the codec is lossy. Only the first piece is sampled."""
        return self._is_first and self.communicator.tracer.samples and not self.compressor.wire_is_tensor

    @cached_property
    def error_probe(self) -> "EncodingErrorProbe":
        """Notifies observers of the encoding error of the beginning of the local chunk."""
        from torchbagua.collectives.encoding_error import EncodingErrorProbe

        return EncodingErrorProbe(self.communicator.tracer, self.compressor, self.layouts[self.rank], self.spec.name)

    def _messages(self, operation: str) -> list[Span]:
        communicator, counts, own_bytes = self.communicator, self._counts[operation], self._wire_bytes[self.rank]
        peers = [peer for peer in range(communicator.size) if peer != communicator.rank]
        spans = []
        for peer in peers:
            details = self._details(operation, counts.sent[peer], own_bytes)
            spans.append(communicator.message_span("send", peer, details, on_host=False))
        for peer in peers:
            details = self._details(operation, counts.received[peer], own_bytes)
            spans.append(communicator.message_span("receive", peer, details, on_host=False))
        return spans

    def _details(self, operation: str, num_elements: int, wire_bytes: int) -> Details:
        return Details(
            operation,
            self.spec.name,
            num_elements=num_elements,
            raw_bytes=num_elements * self.spec.dtype.itemsize,
            wire_bytes=wire_bytes,
        )


class EncodingFailure(Exception):
    """A codec raised `cause` when it encoded a tensor, possibly while the lane was working on another bucket.

    Attributes:
        what, bucket: the operation that failed, and its bucket.
        cause: the error that the codec raised.
    """

    def __init__(self, what: str, bucket: str, cause: Exception) -> None:
        super().__init__(f"{what} on {bucket}: {cause!r}")
        self.what, self.bucket, self.cause = what, bucket, cause


class ReduceScatter:
    """One reduce-scatter: ranks encode the chunks and send them to their owners, which decode and sum them.

    1. The constructor posts the receives.
    2. `send`: encode the chunks, and send each chunk to its owner. Between CPUs, the local chunk is encoded in step 3,
       while the other chunks are in flight.
    3. `receive_mean`, or `receive_encoded_mean`: wait for all copies of the local chunk, decode them, sum them in rank
       order, in float32 or float64, and divide.

    The scratch memory, one wire and the received chunks, belongs to the communicator.
    """

    def __init__(
        self,
        chunks: RankChunks,
        x_N: torch.Tensor,
        pipeline: Pipeline,
        *,
        divisor: float = 1.0,
        residual: Residual | None = None,
    ) -> None:
        self._chunks = chunks
        self._x_N = x_N
        self._divisor = divisor
        self._residual = residual
        self._wire_W = chunks.wire(x_N)
        self._wires = chunks.wires(self._wire_W)
        self._received_RW = chunks.received()
        if not chunks.are_sent_at_once:
            self._exchange = chunks.exchange(pipeline, "all_to_all", self._received_RW.unbind())

    def send(self) -> None:
        """Encode the chunks, and start to send them; between CPUs, each chunk is encoded shortly before it is sent."""
        chunks, wires = self._chunks, self._wires
        if not chunks.are_coded_at_once:
            self._exchange.send(self._encode(owner, wires[owner]) for owner in self._exchange.targets)
            return
        with chunks.span("encode", "all_to_all"):
            self._write_wire(self._x_N, chunks.layout, self._wire_W, slice(0, self._x_N.numel()))
        if chunks.reports_error:
            self._report_error(wires[chunks.rank])
        if chunks.are_sent_at_once:
            chunks.all_to_all(self._received_RW, self._wire_W)
        else:
            self._exchange.send(wires[owner] for owner in self._exchange.targets)

    def receive_mean(self, out_L: torch.Tensor) -> None:
        """Wait for the local chunk from all ranks, and write the mean to `out_L`, in the dtype of sums."""
        chunks, rows, layout = self._chunks, self._receive(), self._chunks.layouts[self._chunks.rank]
        if layout.num_bytes:
            with chunks.span("reduce", "all_to_all", chunks.rank):
                chunks.compressor.decode_mean(rows, layout, self._divisor, out_L)

    def receive_encoded_mean(
        self,
        wire_W: torch.Tensor,
        residual: Residual | None = None,
        memory_N: torch.Tensor | None = None,
    ) -> None:
        """Wait for the local chunk from all ranks, and encode the mean into `wire_W`."""
        chunks, rows, layout = self._chunks, self._receive(), self._chunks.layouts[self._chunks.rank]
        if not layout.num_bytes:
            return
        with chunks.span("reduce", "all_to_all", chunks.rank):
            if residual is None:
                chunks.compressor.decode_mean_encode(rows, layout, self._divisor, wire_W)
                return
            assert memory_N is not None
            chunks.compressor.decode_mean_encode_feedback(
                rows,
                layout,
                self._divisor,
                residual.added(chunks.within_chunk),
                wire_W,
                residual.stage(chunks.within_chunk),
                memory_N[chunks.own],
            )

    def _receive(self) -> Rows:
        """Wait for the copies of the local chunk, and return them in rank order."""
        chunks, rank = self._chunks, self._chunks.rank
        rows: Rows = self._received_RW
        if chunks.are_sent_at_once:
            return rows
        if chunks.compressor.wire_is_tensor:
            rows = [*rows[:rank], self._wires[rank], *rows[rank + 1 :]]
        elif chunks.are_coded_at_once:
            rows[rank].copy_(self._wires[rank])
        else:
            self._encode(rank, rows[rank])
        self._exchange.wait()
        return rows

    def _encode(self, owner: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the chunk of `owner` into `wire_W`, and return `wire_W`."""
        chunks, elements = self._chunks, self._chunks.elements[owner]
        with chunks.span("encode", "all_to_all", owner):
            try:
                self._write_wire(self._x_N[elements], chunks.layouts[owner], wire_W, elements)
            except Exception as error:
                raise EncodingFailure(f"centralized_mean in {chunks.compressor!r}", chunks.spec.name, error) from error
        if owner == chunks.rank and chunks.reports_error:
            self._report_error(wire_W)
        return wire_W

    def _write_wire(self, x_L: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor, elements: slice) -> None:
        if self._residual is None:
            self._chunks.compressor.encode(x_L, layout, wire_W)
        else:
            self._residual.encode(x_L, self._chunks.compressor, layout, wire_W, elements)

    def _report_error(self, wire_W: torch.Tensor) -> None:
        own = self._chunks.own
        residual_L = None if self._residual is None else self._residual.staged(own)
        self._chunks.error_probe.report(self._x_N[own], wire_W, residual_L)


class AllGather:
    """One all-gather: each rank sends its encoded local chunk to all others, and all ranks decode all chunks.

    1. The constructor posts the receives. It may run before a reduce-scatter of the same piece completes, although an
       owner's chunk arrives in the buffer from which the reduce-scatter sends to this owner: the owner sends its mean
       only after it has received the piece from every rank.
    2. `send`: send the local chunk to all other ranks, as `own_wire` contains it, or first encode `x_L` into it.
    3. `receive`: decode all chunks, the local one too, so that results are bitwise equal on all ranks.

    Attributes:
        own_wire: the buffer for the encoded local chunk.
    """

    def __init__(self, chunks: RankChunks, out_N: torch.Tensor, pipeline: Pipeline) -> None:
        self._chunks = chunks
        self._out_N = out_N
        self._wire_W = chunks.wire(out_N)
        self._wires = chunks.wires(self._wire_W)
        self.own_wire = self._wires[chunks.rank]
        if not chunks.are_sent_at_once:
            self._exchange = chunks.exchange(pipeline, "all_gather", self._wires)

    def send(self, x_L: torch.Tensor | None = None) -> None:
        """Start to send the local chunk, which is `x_L`, or already encoded in `own_wire`."""
        chunks = self._chunks
        if x_L is not None:
            with chunks.span("encode", "all_gather", chunks.rank):
                chunks.compressor.encode(x_L, chunks.layouts[chunks.rank], self.own_wire)
        if chunks.are_sent_at_once:
            chunks.all_gather(self._wire_W, self.own_wire)
        else:
            self._exchange.send(itertools.repeat(self.own_wire))

    def receive(self) -> None:
        """Decode all chunks, each when it has arrived."""
        chunks = self._chunks
        is_decoded = not chunks.compressor.wire_is_tensor  # else messages arrive directly in `out_N`
        if is_decoded and not chunks.are_coded_at_once:
            self._decode(chunks.rank)
            for owner in self._exchange.arrivals():
                self._decode(owner)
            return
        if not chunks.are_sent_at_once:
            self._exchange.wait()
        if is_decoded:
            with chunks.span("decode", "all_gather"):
                chunks.compressor.decode(self._wire_W, chunks.layout, self._out_N)

    def _decode(self, owner: int) -> None:
        chunks = self._chunks
        with chunks.span("decode", "all_gather", owner):
            chunks.compressor.decode(self._wires[owner], chunks.layouts[owner], self._out_N[chunks.elements[owner]])


def reduce_scatter(chunks: RankChunks, x_N: torch.Tensor, out_L: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Write the mean of the local chunk of `x_N` to `out_L`, in the dtype of sums. `x_N` is unchanged."""
    pipeline = Pipeline(chunks.communicator, chunks.spec.device)
    scatter = ReduceScatter(chunks, x_N, pipeline, divisor=divisor)
    scatter.send()
    scatter.receive_mean(out_L)
    pipeline.wait_for_sends()


def all_gather(chunks: RankChunks, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
    """Write the chunks of all ranks to `out_N`. `x_L` is the local chunk, and may be a view of its slice of `out_N`."""
    pipeline = Pipeline(chunks.communicator, chunks.spec.device)
    gather = AllGather(chunks, out_N, pipeline)
    gather.send(x_L)
    gather.receive()
    pipeline.wait_for_sends()
