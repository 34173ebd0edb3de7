"""Reduce-scatter: every rank gets the sum, or the mean, of its own chunk of a flat tensor.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import torch

from torchbagua.collectives.encoding_error import EncodingError
from torchbagua.collectives.error_feedback import Residual
from torchbagua.collectives.exchange import ElementCounts, Exchange
from torchbagua.collectives.wire_rows import WireRows
from torchbagua.compressors import WireLayout


class ReduceScatter:
    """Chunks are encoded and sent to the ranks that own them, which decode and add up what they receive.

    1. Encode the chunks.
    2. All-to-all: each rank receives its own chunk from all others.
    3. Decode the copies of own chunk, add them in rank order, in float32 or float64, divide.

    Between CPUs a chunk is encoded just before it is sent, while others are under way. On a GPU all are encoded at
    once. Scratch memory, one wire and the rows that are received, is the communicator's.

    Args:
        rows: the tensor's chunks, and how they lie on the wire.
        divisor: of the sum.
        residual: what compression left out before is added to the tensor, float32, and what it leaves out now is
            staged there; it has the tensor's elements.
    """

    def __init__(self, rows: WireRows, *, divisor: float = 1.0, residual: Residual | None = None) -> None:
        self.rows = rows
        self._divisor = divisor
        self._residual = residual
        own_length = rows.lengths[rows.rank]
        self._counts = ElementCounts(rows.lengths, [own_length] * len(rows.lengths), rows.element_bytes)
        self._error = EncodingError(rows.communicator.tracer, rows.compressor, rows.own_layout, rows.name)

    def __call__(self, x_N: torch.Tensor, out_L: torch.Tensor) -> None:
        """Write the mean of own chunk to `out_L`, in the dtype that sums are formed in. What `x_N` holds then is open.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        rows_RW = self.begin(x_N).run()
        if out_L.numel():
            with self.rows.span("reduce", "all_to_all", self.rows.rank):
                self.rows.compressor.decode_mean(rows_RW, self.rows.own_layout, self._divisor, out_L)

    def begin(self, x_N: torch.Tensor) -> "Scattering":
        """Return a scattering of `x_N`, whose receives may be posted already."""
        return Scattering(self, self._counts, x_N)

    def encode_all(self, x_N: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Encode all chunks into `wire_W`."""
        self._encode(x_N, self.rows.layout, wire_W, slice(0, len(x_N)))
        self._tell_error(x_N[self.rows.own], wire_W[self.rows.layout.rows[self.rows.rank]])

    def encode_chunk(self, x_N: torch.Tensor, peer: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the chunk that `peer` owns into `wire_W`, and return that."""
        elements = self.rows.layout.elements[peer]
        self._encode(x_N[elements], self.rows.chunks[peer], wire_W, elements, peer)
        if peer == self.rows.rank:
            self._tell_error(x_N[elements], wire_W)
        return wire_W

    def _encode(
        self, x_L: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor, elements: slice, peer: int | None = None
    ) -> None:
        with self.rows.span("encode", "all_to_all", peer):
            if self._residual is None:
                self.rows.compressor.encode(x_L, layout, wire_W)
            else:
                self._residual.encode(x_L, self.rows.compressor, layout, wire_W, elements)

    def _tell_error(self, x_L: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Tell observers what encoding own chunk has left out of it."""
        if self._error.is_wanted:
            self._error.tell(x_L, wire_W, None if self._residual is None else self._residual.staged(self.rows.own))


class Scattering:
    """One reduce-scatter under way, up to the sum."""

    def __init__(self, scatter: ReduceScatter, counts: ElementCounts, x_N: torch.Tensor) -> None:
        rows = scatter.rows
        self._scatter = scatter
        self._counts = counts
        self._x_N = x_N
        self._wire_W = rows.wire(x_N)
        self._rows_RW = rows.received(x_N.device)
        self._exchange: Exchange | None = None
        if not rows.are_equal:
            received = list(self._rows_RW)
            self._exchange = Exchange(rows.communicator, "all_to_all", received, rows.name, counts=counts)
            self._exchange.expect()

    def run(self) -> torch.Tensor:
        """Encode and send the chunks; return [R, W], the wires of own chunk by the rank that they come from.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        scatter, rows = self._scatter, self._scatter.rows
        x_N, wire_W, rows_RW = self._x_N, self._wire_W, self._rows_RW
        if self._exchange is None:
            scatter.encode_all(x_N, wire_W)
            rows.all_to_all(rows_RW, wire_W, self._counts)
            return rows_RW
        wires = [wire_W[row] for row in rows.layout.rows]
        if rows.are_coded_at_once:
            scatter.encode_all(x_N, wire_W)
            rows_RW[rows.rank].copy_(wires[rows.rank])
            self._exchange.run(lambda peer: wires[peer])
        else:
            scatter.encode_chunk(x_N, rows.rank, rows_RW[rows.rank])
            self._exchange.run(lambda peer: scatter.encode_chunk(x_N, peer, wires[peer]))
        return rows_RW
