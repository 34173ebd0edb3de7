"""The two-phase mean: a compressed reduce-scatter, then a compressed all-gather.

A flat tensor is cut into one chunk for each rank. A *piece* is one of the parts in which chunks are sent: the first
part of every chunk, the second part of every chunk, and so on.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from torchbagua import _concurrency
from torchbagua.codecs.base import Compressor, TensorSpec, WireLayout
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.error_feedback import TwoPhaseResiduals, report_residuals
from torchbagua.collectives.exchange import ElementCounts, Exchange, Overlap, OverlappingMean, Pipeline, exhaust
from torchbagua.collectives.residuals import Residual
from torchbagua.collectives.value_form import CodecOf, ValueForm
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator

if TYPE_CHECKING:
    from torchbagua.collectives.encoding_error import EncodingErrorProbe

_NUM_RUNS = 3

# 1.6 Gbit/s, over the whole time of an operation. In faster operations, a second message costs more CPU time than the
# overlap of computation with the first message saves.
_SLOW_BYTES_PER_S = 0.2e9

# Wires by the rank that sent them, [R, W]. If the wire is the tensor, a list, since this rank's row is not copied.
Rows = Any


@dataclass(frozen=True)
class Piece:
    """One part of every chunk, indexed by the rank that owns the chunk.

    Attributes:
        index: the index of the piece.
        number: distinguishes pieces that are in flight at the same time.
        elements: the elements of the tensor.
        byte_slices: the bytes of the tensor's wire.
        layouts: the layout of each part as a separate tensor with a separate wire.
        within_own: the elements of the piece within the local chunk.
        scatter_counts, gather_counts: elements of the messages when chunks are sent to their owners, and when owners
            send them to all ranks.
    """

    index: int
    number: int
    elements: Sequence[slice]
    byte_slices: Sequence[slice]
    layouts: Sequence[WireLayout]
    within_own: slice
    scatter_counts: ElementCounts
    gather_counts: ElementCounts


class RankChunks:
    """A flat tensor cut into one chunk for each rank, which owns it, and the places of the chunks in the tensor's wire.

    Args:
        communicator: the ranks that own the chunks.
        compressor: the codec of the chunks. It must encode the tensor's dtype.
        spec: the tensor.
        cuts: the boundaries of the chunks, one chunk for each rank, see `TensorSpec.even_cuts`; or of the pieces in
            which they are sent, see `TensorSpec.cuts_within`. Chunks that are coded at once have one piece.
        part: the number of the first piece. Tensors whose chunks are in flight over this communicator at the same time
            have different piece numbers.

    Attributes:
        communicator, compressor: the arguments.
        name: the tensor's name.
        rank: the number of this rank in the communicator.
        device: the tensor's device.
        layout: the layout of all pieces of the first chunk, then of the second chunk, and so on.
        own: the elements of the local chunk.
        pieces: the pieces in which chunks are sent, so that a rank can compute one while another is in flight.
        are_sent_at_once: whether one collective sends all chunks, which are then padded to equal length. This is so if
            the communicator does not post individual messages.
        are_coded_at_once: whether one launch encodes or decodes all chunks, as on a GPU.

    Raises:
        ValueError: `cuts` do not fit this tensor.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        cuts: Sequence[int],
        part: int = 0,
    ) -> None:
        self.communicator = communicator
        self.compressor = compressor
        self.name = spec.name
        self.rank = communicator.rank
        self.device = spec.device
        self._element_bytes = spec.dtype.itemsize
        posts_messages = communicator.posts_messages(spec.device)
        self.are_sent_at_once = not (posts_messages or compressor.wire_is_tensor)
        self.are_coded_at_once = not posts_messages or spec.device.type == "cuda"
        num_pieces = (len(cuts) - 1) // communicator.size
        assert num_pieces == 1 or not self.are_coded_at_once
        self._part = part
        self._roles = f"wire {part}", f"received {part}"  # of scratch memory
        self.layout = compressor.layout(spec, cuts, equal_bytes=self.are_sent_at_once)
        self.own = slice(cuts[self.rank * num_pieces], cuts[(self.rank + 1) * num_pieces])
        self.pieces = [self._piece(index, num_pieces) for index in range(num_pieces)]
        # Scratch memory, and views of its parts, which stay valid until the scratch memory changes.
        self._wire_W: torch.Tensor | None = None
        self._wires: list[list[torch.Tensor]] = []
        self._received_W: torch.Tensor | None = None
        self._received: list[torch.Tensor] = []

    @property
    def reports_error(self) -> bool:
        """Whether an observer samples this step, and the codec is lossy."""
        return self.communicator.tracer.samples and not self.compressor.wire_is_tensor

    @cached_property
    def error_probe(self) -> "EncodingErrorProbe":
        """Notifies observers of the encoding error of the beginning of the local chunk."""
        from torchbagua.collectives.encoding_error import EncodingErrorProbe

        own_layout = self.pieces[0].layouts[self.rank]
        return EncodingErrorProbe(self.communicator.tracer, self.compressor, own_layout, self.name)

    @classmethod
    def of_rows(
        cls, communicator: Communicator, compressor: Compressor, row: TensorSpec, rows_each: int = 1
    ) -> "RankChunks":
        """Return the chunks of a tensor of equal rows. Each rank owns the same number of consecutive rows.

        Args:
            communicator, compressor: as in the constructor.
            row: the description of a row.
            rows_each: the number of rows that each rank owns.
        """
        num_rows = rows_each * communicator.size
        whole = replace(row, segment_lengths=row.segment_lengths * num_rows)
        cuts = [rank * rows_each * row.num_elements for rank in range(communicator.size + 1)]
        return cls(communicator, compressor, whole, cuts)

    def _piece(self, index: int, num_pieces: int) -> Piece:
        """Return a piece, whose parts are at `index` and every `num_pieces` further in the layout."""
        size = self.communicator.size
        elements = self.layout.elements[index::num_pieces]
        lengths = [part.stop - part.start for part in elements]
        own_length = [lengths[self.rank]] * size
        own = elements[self.rank]
        return Piece(
            index=index,
            number=self._part + index,
            elements=elements,
            byte_slices=self.layout.byte_slices[index::num_pieces],
            layouts=[self.layout.chunk(index + owner * num_pieces) for owner in range(size)],
            within_own=slice(own.start - self.own.start, own.stop - self.own.start),
            scatter_counts=ElementCounts(lengths, own_length, self._element_bytes),
            gather_counts=ElementCounts(own_length, lengths, self._element_bytes),
        )

    def wire(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the wire of `x_N`: its own memory, or the communicator's scratch memory."""
        if self.compressor.wire_is_tensor:
            return x_N.view(torch.uint8)
        return self.communicator.scratch(self._roles[0], self.layout.num_bytes, x_N.device)

    def wires(self, wire_W: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the parts of a wire: for each piece, the parts of the chunks in the order of their owners."""
        if wire_W is self._wire_W:
            return self._wires
        wires = [[wire_W[part] for part in piece.byte_slices] for piece in self.pieces]
        if not self.compressor.wire_is_tensor:  # else it is the caller's memory; keep no views of it
            self._wire_W, self._wires = wire_W, wires
        return wires

    def received(self, device: torch.device) -> list[torch.Tensor]:
        """Return buffers for the local part of each piece from each rank, [R, W] each, in scratch memory."""
        size = self.communicator.size
        lengths = [size * piece.layouts[self.rank].num_bytes for piece in self.pieces]
        memory = self.communicator.scratch(self._roles[1], sum(lengths), device)
        if memory is not self._received_W:
            self._received_W = memory
            self._received = [part.view(size, part.numel() // size) for part in memory.split(lengths)]
        return self._received

    def all_to_all(self, received_RW: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Send each rank its chunk's part of `wire_W` and receive the local chunk from all, by one collective."""
        counts = self.pieces[0].scatter_counts
        messages = partial(self._messages, "all_to_all", counts)
        self.communicator.all_to_all_single(received_RW.view(-1), wire_W, f"all_to_all of {self.name}", messages)

    def all_gather(self, wire_W: torch.Tensor, own_wire: torch.Tensor) -> None:
        """Send `own_wire`, the local part of `wire_W`, to all ranks and receive theirs, by one collective."""
        counts = self.pieces[0].gather_counts
        messages = partial(self._messages, "all_gather", counts)
        self.communicator.all_gather_into_tensor(wire_W, own_wire, f"all_gather of {self.name}", messages)

    def span(self, phase: Phase, operation: str, piece: Piece, owner: int | None = None) -> Span:
        """Return a span of a phase of the work on a piece, for the chunk of `owner` or for all chunks."""
        if self.communicator.tracer.is_idle:
            return NO_SPAN
        owners = range(self.communicator.size) if owner is None else [owner]
        num_elements = sum(piece.scatter_counts.sent[rank] for rank in owners)
        wire_bytes = sum(piece.layouts[rank].num_bytes for rank in owners)
        return self.communicator.span(phase, self._details(operation, num_elements, wire_bytes))

    def _messages(self, operation: str, counts: ElementCounts) -> list[Span]:
        communicator = self.communicator
        own_bytes = self.pieces[0].layouts[self.rank].num_bytes
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
            self.name,
            num_elements=num_elements,
            raw_bytes=num_elements * self._element_bytes,
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

    1. `send`: encode the chunks, and send each chunk to its owner.
    2. `receive_mean`, or `receive_encoded_mean`: wait for all copies of the local chunk, decode them, sum them in rank
       order, in float32 or float64, and divide.

    Both work on one piece, so that a rank can compute one piece while another is in flight: send all pieces, then
    receive all. The scratch memory, one wire and the received chunks, belongs to the communicator.

    Args:
        chunks: the tensor's chunks, and their layout on the wire.
        x_N: the tensor. It is unchanged unless there is a residual or `codec_of`; its values are then undefined.
        pipeline: the pipeline of the exchanges that are in flight together with these.
        divisor: the divisor of the sum.
        residual: added to the tensor, which must be float32; the new residual is staged there. It has the tensor's
            elements.
        codec_of: the codecs that encode the tensor, if these are not `chunks.compressor`, which decodes the same bytes;
            see `ValueForm`.
    """

    def __init__(
        self,
        chunks: RankChunks,
        x_N: torch.Tensor,
        pipeline: Pipeline,
        *,
        divisor: float = 1.0,
        residual: Residual | None = None,
        codec_of: CodecOf | None = None,
    ) -> None:
        self._codec_of = codec_of or (lambda elements: chunks.compressor)
        self._chunks = chunks
        self._x_N = x_N
        self._divisor = divisor
        self._residual = residual
        self._wire_W = chunks.wire(x_N)
        self._received = chunks.received(x_N.device)
        self._exchanges: list[Exchange] = []
        if not chunks.are_sent_at_once:
            for piece, received_RW in zip(chunks.pieces, self._received, strict=True):
                receives, counts = list(received_RW), piece.scatter_counts
                self._exchanges.append(
                    Exchange(pipeline, "all_to_all", receives, chunks.name, counts=counts, piece=piece.number)
                )

    def send(self, piece: Piece) -> None:
        """Encode a piece of all chunks except the local one, each shortly before it is sent, and start to send it.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks = self._chunks
        if chunks.are_coded_at_once:
            self._encode_all()
        if chunks.are_sent_at_once:
            chunks.all_to_all(self._received[0], self._wire_W)
            return
        exchange, wires = self._exchanges[piece.index], chunks.wires(self._wire_W)[piece.index]
        if chunks.are_coded_at_once:
            exchange.send(wires[owner] for owner in exchange.targets)
        else:
            exchange.send(self._encode(piece, owner, wires[owner]) for owner in exchange.targets)

    def receive_mean(self, piece: Piece, out_L: torch.Tensor) -> None:
        """Wait for the local part of a piece from all ranks, and write the mean to `out_L`, in the dtype of sums.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks, rows, layout = self._chunks, self._receive(piece), piece.layouts[self._chunks.rank]
        if layout.num_bytes:
            with chunks.span("reduce", "all_to_all", piece, chunks.rank):
                chunks.compressor.decode_mean(rows, layout, self._divisor, out_L)

    def receive_encoded_mean(
        self,
        piece: Piece,
        wire_W: torch.Tensor,
        residual: Residual | None = None,
        memory_N: torch.Tensor | None = None,
    ) -> None:
        """Wait for the local part of a piece from all ranks, and encode the mean into `wire_W`.

        Args:
            piece: a piece of all chunks.
            wire_W: the buffer for the encoded mean.
            residual: the residual of the means of the local chunk. It is added, and the new residual is staged there.
            memory_N: with a residual, the scattered tensor or a tensor like it. The mean is written to its local part
                before it is encoded; the other values are unchanged.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks, rows, layout = self._chunks, self._receive(piece), piece.layouts[self._chunks.rank]
        if not layout.num_bytes:
            return
        with chunks.span("reduce", "all_to_all", piece, chunks.rank):
            if residual is None:
                chunks.compressor.decode_mean_encode(rows, layout, self._divisor, wire_W)
                return
            assert memory_N is not None
            chunks.compressor.decode_mean_encode_feedback(
                rows,
                layout,
                self._divisor,
                residual.added(piece.within_own),
                wire_W,
                residual.stage(piece.within_own),
                memory_N[piece.elements[chunks.rank]],
            )

    def _receive(self, piece: Piece) -> Rows:
        """Wait for the copies of the local part of a piece, and return them in rank order."""
        chunks, own = self._chunks, self._chunks.rank
        rows: Rows = self._received[piece.index]
        if chunks.are_sent_at_once:
            return rows
        own_W = chunks.wires(self._wire_W)[piece.index][own]
        if chunks.compressor.wire_is_tensor:
            rows = [*rows[:own], own_W, *rows[own + 1 :]]
        elif chunks.are_coded_at_once:
            rows[own].copy_(own_W)
        else:
            self._encode(piece, own, rows[own])
        self._exchanges[piece.index].wait()
        return rows

    def _encode_all(self) -> None:
        chunks, x_N = self._chunks, self._x_N
        with chunks.span("encode", "all_to_all", chunks.pieces[0]):
            self._write_wire(x_N, chunks.layout, self._wire_W, slice(0, x_N.numel()))
        if chunks.reports_error:
            self._report_error(x_N[chunks.own], chunks.wires(self._wire_W)[0][chunks.rank])

    def _encode(self, piece: Piece, owner: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the part of a piece that `owner` owns into `wire_W`, and return `wire_W`."""
        chunks, elements = self._chunks, piece.elements[owner]
        with chunks.span("encode", "all_to_all", piece, owner):
            try:
                self._write_wire(self._x_N[elements], piece.layouts[owner], wire_W, elements)
            except Exception as error:
                raise EncodingFailure(f"centralized_mean in {chunks.compressor!r}", chunks.name, error) from error
        if chunks.reports_error and owner == chunks.rank and piece.index == 0:
            self._report_error(self._x_N[elements], wire_W)
        return wire_W

    def _write_wire(self, x_L: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor, elements: slice) -> None:
        codec = self._codec_of(elements)
        if self._residual is None:
            codec.encode(x_L, layout, wire_W)
        else:
            self._residual.encode(x_L, codec, layout, wire_W, elements)

    def _report_error(self, x_L: torch.Tensor, wire_W: torch.Tensor) -> None:
        residual_L = None if self._residual is None else self._residual.staged(self._chunks.own)
        self._chunks.error_probe.report(x_L, wire_W, residual_L)


class AllGather:
    """One all-gather: each rank encodes its local chunk and sends it to all others, and all ranks decode all chunks.

    A rank decodes its local chunk too, so the results are bitwise equal on all ranks. `send` and `receive` work on one
    piece, so that a rank can compute one piece while another is in flight: send all pieces, then receive all.

    The scratch memory, one wire buffer, belongs to the communicator. A reduce-scatter of the same chunks sends from the
    same buffer. You may construct the all-gather before that reduce-scatter completes, because a rank sends its mean
    only after it has received that piece from every rank.

    Args:
        chunks: the tensor's chunks, and their layout on the wire.
        out_N: the output, for all chunks.
        pipeline: the pipeline of the exchanges that are in flight together with these.
        codec_of: the codecs that decode chunks, if these are not `chunks.compressor`; see `ValueForm`.
    """

    def __init__(
        self, chunks: RankChunks, out_N: torch.Tensor, pipeline: Pipeline, *, codec_of: CodecOf | None = None
    ) -> None:
        self._codec_of = codec_of or (lambda elements: chunks.compressor)
        self._chunks = chunks
        self._out_N = out_N
        self._wire_W = chunks.wire(out_N)
        self._wires = chunks.wires(self._wire_W)
        self._exchanges: list[Exchange] = []
        if not chunks.are_sent_at_once:
            for piece in chunks.pieces:
                receives, counts = self._wires[piece.index], piece.gather_counts
                self._exchanges.append(
                    Exchange(pipeline, "all_gather", receives, chunks.name, counts=counts, piece=piece.number)
                )

    def own_wire(self, piece: Piece) -> torch.Tensor:
        """Return the buffer for the encoded local part of a piece. Write it before `send`."""
        return self._wires[piece.index][self._chunks.rank]

    def send(self, piece: Piece, x_L: torch.Tensor | None = None) -> None:
        """Start to send the local part of a piece.

        Args:
            piece: a piece of all chunks.
            x_L: the local part, to encode; None if the caller has already written `own_wire`.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks, own_wire = self._chunks, self.own_wire(piece)
        if x_L is not None:
            with chunks.span("encode", "all_gather", piece, chunks.rank):
                chunks.compressor.encode(x_L, piece.layouts[chunks.rank], own_wire)
        if chunks.are_sent_at_once:
            chunks.all_gather(self._wire_W, own_wire)
        else:
            self._exchanges[piece.index].send(itertools.repeat(own_wire))

    def receive(self, piece: Piece) -> None:
        """Decode a piece of all chunks, each part when it has arrived.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks = self._chunks
        if chunks.compressor.wire_is_tensor:  # messages arrive directly in `out_N`
            if not chunks.are_sent_at_once:
                self._exchanges[piece.index].wait()
            return
        if not chunks.are_coded_at_once:
            self._decode(piece, chunks.rank)
            for owner in self._exchanges[piece.index].arrivals():
                self._decode(piece, owner)
            return
        if not chunks.are_sent_at_once:
            self._exchanges[piece.index].wait()
        with chunks.span("decode", "all_gather", piece):
            codec = self._codec_of(slice(0, self._out_N.numel()))
            codec.decode(self._wire_W, chunks.layout, self._out_N)

    def _decode(self, piece: Piece, owner: int) -> None:
        chunks = self._chunks
        with chunks.span("decode", "all_gather", piece, owner):
            wire_W, elements = self._wires[piece.index][owner], piece.elements[owner]
            self._codec_of(elements).decode(wire_W, piece.layouts[owner], self._out_N[elements])


class TwoPhaseMean(OverlappingMean):
    """Mean of a flat tensor: compressed reduce-scatter, then compressed all-gather (ScatterReduce, arXiv 2107.01499).

    1. Reduce-scatter: each rank decodes all copies of its local chunk, sums them in rank order and divides.
    2. The rank encodes the mean of its local chunk, on a CPU in the same pass as part 1, on a GPU with residuals in a
       second pass.
    3. All-gather: each rank decodes all means, that of its local chunk too, so results are bitwise equal on all ranks.

    Between CPUs, long chunks are sent in two pieces, so that a link carries one piece while the other is computed,
    unless the first runs were fast on all ranks.

    Args:
        communicator: the ranks that take part.
        compressor: the codec of the chunks. It must encode the tensor's dtype.
        spec: the tensor.
        divisor: the divisor of the sum.
        residuals: added in both phases; the new residuals are staged there. The tensor must be float32 and averaged in
            place. The mean assigns them the slices that this rank sends and owns.
        start: the element of the residuals' bucket at which the tensor begins.
        form: the form in which values are averaged: encoding converts them to it, and decoding converts the mean back.
            The tensor must be float32 and averaged in place.
        overlap: the state shared with the means with which this mean may overlap; by default it overlaps with none.
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
        form: ValueForm | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self._overlap = overlap or Overlap(communicator)
        self._part = self._overlap.next_part()
        self._communicator = communicator
        self._compressor = compressor
        self._spec = spec
        self._divisor = divisor
        self._residuals = residuals
        self._form = form
        self._cuts = cuts = spec.even_cuts(communicator.size, compressor.block_elements)
        if residuals is not None:
            own = slice(*cuts[communicator.rank : communicator.rank + 2])
            residuals.assign_slices(
                sent=slice(start, start + spec.num_elements), mean=slice(start + own.start, start + own.stop)
            )
        self._cut(2 if is_long(communicator, compressor, spec, cuts) else 1)
        sent_bytes = 2 * (communicator.size - 1) / communicator.size * self._chunks.layout.num_bytes
        self._first_runs = FirstRuns(communicator, sent_bytes, spec.name)

    def may_begin(self) -> bool:
        """Return whether it can begin without blocking: between CPUs, after the first runs, while its part is free."""
        is_coded_at_once = self._chunks.are_coded_at_once
        return self._first_runs.are_over and not (is_coded_at_once or self._overlap.is_in_flight(self._part))

    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when all chunks are in flight, and then before each wait for a piece of means.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        if len(self._chunks.pieces) > 1 and self._first_runs.should_disable_pieces():
            self._cut(1)
        pipeline = self._overlap.begin(self._part, x_N.device)
        run = self._run(x_N, x_N if out_N is None else out_N, pipeline)
        if self._first_runs.are_over:
            yield from run
        else:
            with self._first_runs:  # without overlap, to time this mean alone
                exhaust(run)
        self._overlap.end(self._part)
        tracer = self._communicator.tracer
        if self._residuals is not None and tracer.samples:
            report_residuals(tracer, self._spec.name, self._residuals)

    def _run(self, x_N: torch.Tensor, out_N: torch.Tensor, pipeline: Pipeline) -> Iterator[None]:
        chunks = self._chunks
        sent, mean = (None, None) if self._residuals is None else (self._residuals.sent, self._residuals.mean)
        codec_of = None if self._form is None else self._form.codec_of(self._compressor)
        scatter = ReduceScatter(chunks, x_N, pipeline, divisor=self._divisor, residual=sent, codec_of=codec_of)
        gather = AllGather(chunks, out_N, pipeline, codec_of=codec_of)  # now, so that receives are posted early
        for piece in chunks.pieces:
            scatter.send(piece)
        yield
        for piece in chunks.pieces:
            scatter.receive_encoded_mean(piece, gather.own_wire(piece), mean, out_N)
            gather.send(piece)
        for piece in chunks.pieces:
            yield  # everything that this mean sends is in the pipeline
            gather.receive(piece)
        pipeline.wait_for_sends()

    def _cut(self, num_pieces: int) -> None:
        """Cut chunks into this number of pieces. Blocks do not change, so the mean is bitwise the same."""
        cuts = self._cuts
        if num_pieces > 1:
            cuts = self._spec.cuts_within(cuts, num_pieces, self._compressor.block_elements)
        self._chunks = RankChunks(self._communicator, self._compressor, self._spec, cuts, self._part)


def is_long(communicator: Communicator, compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]) -> bool:
    """Return whether the halves of the longest chunk are long messages between CPUs. The same on all ranks."""
    is_coded_at_once = spec.device.type == "cuda" or not communicator.posts_messages(spec.device)
    if is_coded_at_once or not compressor.codes_blocks_alone:
        return False
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    num_bytes = compressor.wire_bytes(longest, -(-longest // compressor.block_elements), spec.dtype)
    return num_bytes > 2 * SMALL_MESSAGE_BYTES


class FirstRuns:
    """Counts the runs of an operation, and times them: a context manager around each run.

    Args:
        communicator: a communicator over all ranks that run the operation.
        sent_bytes: the bytes that this rank sends in a run, over most of its links.
        name: the name of the operation's tensor, in errors.
    """

    def __init__(self, communicator: Communicator, sent_bytes: float, name: str) -> None:
        self._communicator = communicator
        self._sent_bytes = sent_bytes
        self._purpose = f"the pieces of {name}"
        self._num_runs = 0
        self._shortest_s = math.inf
        self._start_s = 0.0

    @property
    def are_over(self) -> bool:
        """Whether the run that follows the decision of `should_disable_pieces` is complete too."""
        return self._num_runs > _NUM_RUNS

    def should_disable_pieces(self) -> bool:
        """Return, once, whether the first runs were fast on all ranks. Collective when called after the first runs."""
        if self._num_runs != _NUM_RUNS:
            return False
        is_slow = self._sent_bytes < _SLOW_BYTES_PER_S * self._shortest_s
        return not all_reduce_max(self._communicator, [is_slow], self._purpose)[0]

    def __enter__(self) -> None:
        self._start_s = _concurrency.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._shortest_s = min(self._shortest_s, _concurrency.perf_counter() - self._start_s)
        self._num_runs += 1


def reduce_scatter(chunks: RankChunks, x_N: torch.Tensor, out_L: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Write the mean of the local chunk of `x_N` over the ranks to `out_L`, in the dtype of sums. `x_N` is unchanged.

    Args:
        chunks: the tensor's chunks.
        x_N: the tensor.
        out_L: the output, for the mean.
        divisor: the divisor of the sum.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    pipeline = Pipeline(chunks.communicator, chunks.device)
    scatter = ReduceScatter(chunks, x_N, pipeline, divisor=divisor)
    for piece in chunks.pieces:
        scatter.send(piece)
    for piece in chunks.pieces:
        scatter.receive_mean(piece, out_L[piece.within_own])
    pipeline.wait_for_sends()


def all_gather(chunks: RankChunks, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
    """Write the chunks of all ranks to `out_N`. `x_L` is the local chunk, and may be a view of its slice of `out_N`.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    pipeline = Pipeline(chunks.communicator, chunks.device)
    gather = AllGather(chunks, out_N, pipeline)
    for piece in chunks.pieces:
        gather.send(piece, x_L[piece.within_own])
    for piece in chunks.pieces:
        gather.receive(piece)
    pipeline.wait_for_sends()
