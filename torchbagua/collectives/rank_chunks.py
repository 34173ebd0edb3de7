"""A flat tensor cut into one chunk for each rank: what reduce-scatter and all-gather send, and how NCCL moves it.

Shape suffixes: N elements, W wire bytes, R ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch
import torch.distributed as dist

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.exchange import ElementCounts
from torchbagua.collectives.private_groups import all_gather_equal, all_to_all_equal
from torchbagua.compressors import Compressor, TensorSpec, WireLayout
from torchbagua.events import Details, Phase
from torchbagua.tracer import NO_SPAN, Span


class RankChunks:
    """A flat tensor cut into one chunk for each rank, which owns it, and where the chunks lie in the tensor's wire.

    Args:
        communicator: whose ranks own the chunks.
        compressor: makes bytes of them; it encodes the tensor's dtype.
        spec: the tensor.
        cuts: where chunks begin and end, one for each rank, see `TensorSpec.even_cuts`.

    Attributes:
        communicator, compressor: the same.
        name, element_bytes: the tensor's.
        rank: own place in the communicator.
        layout: of all chunks.
        own: the elements of this rank's chunk.
        own_layout: of that chunk, in a tensor and a wire of its own.
        lengths: elements of each chunk.
        scatter_counts, gather_counts: elements of the messages when chunks go to their owners, and when owners send
            them to all.
        nccl_moves_all_at_once: whether NCCL moves all chunks with one call of its own, for which they are padded to
            equal length.
        are_coded_at_once: whether one launch encodes or decodes all chunks, as on a GPU; else it is done chunk by
            chunk, while others are under way.

    Raises:
        ValueError: `cuts` are none of this tensor.
    """

    def __init__(
        self, communicator: Communicator, compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]
    ) -> None:
        self.communicator = communicator
        self.compressor = compressor
        self.name = spec.name
        self.element_bytes = spec.dtype.itemsize
        self.rank = communicator.rank
        is_on_nccl = communicator.is_on_nccl(spec.device)
        self.nccl_moves_all_at_once = is_on_nccl and not compressor.wire_is_tensor
        self.are_coded_at_once = is_on_nccl or spec.device.type == "cuda"
        self.layout = compressor.layout(spec, cuts, equal_bytes=self.nccl_moves_all_at_once)
        self.own = self.layout.elements[self.rank]
        self.own_layout = self.layout.chunk(self.rank)
        self.lengths = [elements.stop - elements.start for elements in self.layout.elements]
        own_length = [self.lengths[self.rank]] * communicator.size
        self.scatter_counts = ElementCounts(self.lengths, own_length, self.element_bytes)
        self.gather_counts = ElementCounts(own_length, self.lengths, self.element_bytes)

    @cached_property
    def chunk_layouts(self) -> list[WireLayout]:
        """The layout of each chunk, in a tensor and a wire of its own."""
        return [self.layout.chunk(rank) for rank in range(self.communicator.size)]

    def wire(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return memory for the wire of `x_N`: its own, or the communicator's scratch."""
        if self.compressor.wire_is_tensor:
            return x_N.view(torch.uint8)
        return self.communicator.scratch("wire", self.layout.num_bytes, x_N.device)

    def received(self, device: torch.device) -> torch.Tensor:
        """Return memory for own chunk's wire from each rank, [R, W]: the communicator's scratch."""
        size, num_bytes = self.communicator.size, self.own_layout.num_bytes
        return self.communicator.scratch("received", size * num_bytes, device).view(size, num_bytes)

    def all_to_all(self, received_RW: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Send each rank its chunk's part of `wire_W` and receive own chunk from all, in one call of NCCL."""
        with self._launching("all_to_all", self.scatter_counts) as nccl:
            all_to_all_equal(nccl, received_RW.view(-1), wire_W)

    def all_gather(self, wire_W: torch.Tensor, own_wire: torch.Tensor) -> None:
        """Send `own_wire`, own part of `wire_W`, to all ranks and receive theirs, in one call of NCCL."""
        with self._launching("all_gather", self.gather_counts) as nccl:
            all_gather_equal(nccl, wire_W, own_wire)

    def span(self, phase: Phase, operation: str, peer: int | None = None) -> Span:
        """Return a phase of the work on the chunk that `peer` owns, or on all chunks."""
        if self.communicator.tracer.is_idle:
            return NO_SPAN
        num_elements = sum(self.lengths) if peer is None else self.lengths[peer]
        byte_slice = slice(0, self.layout.num_bytes) if peer is None else self.layout.byte_slices[peer]
        details = self._details(operation, num_elements, byte_slice.stop - byte_slice.start)
        return self.communicator.span(phase, details)

    def _launching(self, operation: str, counts: ElementCounts) -> AbstractContextManager[dist.ProcessGroup]:
        communicator = self.communicator
        own_bytes = self.own_layout.num_bytes

        def messages() -> list[Span]:
            peers = [peer for peer in range(communicator.size) if peer != communicator.rank]
            spans = []
            for peer in peers:
                details = self._details(operation, counts.sent[peer], own_bytes)
                spans.append(communicator.message_span("send", peer, details, on_nccl=True))
            for peer in peers:
                details = self._details(operation, counts.received[peer], own_bytes)
                spans.append(communicator.message_span("receive", peer, details, on_nccl=True))
            return spans

        return communicator.launching(f"{operation} of {self.name}", messages)

    def _details(self, operation: str, num_elements: int, wire_bytes: int) -> Details:
        return Details(
            operation,
            self.name,
            num_elements=num_elements,
            raw_bytes=num_elements * self.element_bytes,
            wire_bytes=wire_bytes,
        )
