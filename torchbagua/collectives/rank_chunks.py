"""A flat tensor cut into one chunk for each rank, for reduce-scatter and all-gather.

A *piece* is one of the parts in which chunks are sent: the first part of every chunk, the second part of every chunk,
and so on.

Shape suffixes: N elements, W wire bytes, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec, WireLayout
from torchbagua.collectives.encoding_error import EncodingErrorProbe
from torchbagua.collectives.exchange import ElementCounts
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span
from torchbagua.transport.communicator import Communicator


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
        error_probe: notifies observers of the encoding error of the beginning of the local chunk.

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
        own_layout = self.pieces[0].layouts[self.rank]
        self.error_probe = EncodingErrorProbe(communicator.tracer, compressor, own_layout, spec.name)
        # Scratch memory, and views of its parts, which stay valid until the scratch memory changes.
        self._wire_W: torch.Tensor | None = None
        self._wires: list[list[torch.Tensor]] = []
        self._received_W: torch.Tensor | None = None
        self._received: list[torch.Tensor] = []

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
