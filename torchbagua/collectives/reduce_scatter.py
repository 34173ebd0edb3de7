"""Reduce-scatter: every rank gets the sum, or the mean, of its own chunk of a flat tensor.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import torch

from torchbagua.collectives.encoding_error import EncodingErrorProbe
from torchbagua.collectives.exchange import Exchange
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.residuals import Residual
from torchbagua.compressors import WireLayout


class ReduceScatter:
    """Chunks are encoded and sent to the ranks that own them, which decode and add up what they receive.

    1. Encode the chunks.
    2. All-to-all: each rank receives its own chunk from all others.
    3. Decode the copies of own chunk, add them in rank order, in float32 or float64, divide.

    Between CPUs a chunk is encoded just before it is sent, while others are under way. On a GPU all are encoded at
    once. Scratch memory, one wire and the chunks that are received, is the communicator's.

    Args:
        chunks: the tensor's chunks, and how they lie on the wire.
        divisor: of the sum.
        residual: what compression left out before is added to the tensor, float32, and what it leaves out now is
            staged there; it has the tensor's elements.
    """

    def __init__(self, chunks: RankChunks, *, divisor: float = 1.0, residual: Residual | None = None) -> None:
        self.chunks = chunks
        self._divisor = divisor
        self._residual = residual
        self._error_probe = EncodingErrorProbe(
            chunks.communicator.tracer, chunks.compressor, chunks.own_layout, chunks.name
        )

    def __call__(self, x_N: torch.Tensor, out_L: torch.Tensor) -> None:
        """Write the mean of own chunk to `out_L`, in the dtype that sums are formed in.

        `x_N` is left as it is, unless there is a residual: then what it holds afterwards is not defined.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        received_RW = self.begin(x_N).run()
        if out_L.numel():
            with self.chunks.span("reduce", "all_to_all", self.chunks.rank):
                self.chunks.compressor.decode_mean(received_RW, self.chunks.own_layout, self._divisor, out_L)

    def begin(self, x_N: torch.Tensor) -> "Scattering":
        """Return a scattering of `x_N`, whose receives may be posted already."""
        return Scattering(self, x_N)

    def encode_all(self, x_N: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Encode all chunks into `wire_W`."""
        self._encode(x_N, self.chunks.layout, wire_W, slice(0, len(x_N)))
        self._tell_error(x_N[self.chunks.own], wire_W[self.chunks.layout.byte_slices[self.chunks.rank]])

    def encode_chunk(self, x_N: torch.Tensor, peer: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the chunk that `peer` owns into `wire_W`, and return that."""
        elements = self.chunks.layout.elements[peer]
        self._encode(x_N[elements], self.chunks.chunk_layouts[peer], wire_W, elements, peer)
        if peer == self.chunks.rank:
            self._tell_error(x_N[elements], wire_W)
        return wire_W

    def _encode(
        self, x_L: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor, elements: slice, peer: int | None = None
    ) -> None:
        with self.chunks.span("encode", "all_to_all", peer):
            if self._residual is None:
                self.chunks.compressor.encode(x_L, layout, wire_W)
            else:
                self._residual.encode(x_L, self.chunks.compressor, layout, wire_W, elements)

    def _tell_error(self, x_L: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Tell observers what encoding own chunk has left out of it."""
        if self._error_probe.is_wanted:
            self._error_probe.tell(
                x_L, wire_W, None if self._residual is None else self._residual.staged(self.chunks.own)
            )


class Scattering:
    """One reduce-scatter under way, up to the sum."""

    def __init__(self, scatter: ReduceScatter, x_N: torch.Tensor) -> None:
        chunks = scatter.chunks
        self._scatter = scatter
        self._x_N = x_N
        self._wire_W = chunks.wire(x_N)
        self._received_RW = chunks.received(x_N.device)
        self._exchange: Exchange | None = None
        if not chunks.nccl_moves_all_at_once:
            received = list(self._received_RW)
            self._exchange = Exchange(
                chunks.communicator, "all_to_all", received, chunks.name, counts=chunks.scatter_counts
            )
            self._exchange.post_first_receive()

    def run(self) -> torch.Tensor:
        """Encode and send the chunks; return [R, W], the wires of own chunk by the rank that they come from.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        scatter, chunks = self._scatter, self._scatter.chunks
        x_N, wire_W, received_RW = self._x_N, self._wire_W, self._received_RW
        if self._exchange is None:
            scatter.encode_all(x_N, wire_W)
            chunks.all_to_all(received_RW, wire_W)
            return received_RW
        wires = [wire_W[own_bytes] for own_bytes in chunks.layout.byte_slices]
        if chunks.are_coded_at_once:
            scatter.encode_all(x_N, wire_W)
            received_RW[chunks.rank].copy_(wires[chunks.rank])
            self._exchange.run(lambda peer: wires[peer])
        else:
            scatter.encode_chunk(x_N, chunks.rank, received_RW[chunks.rank])
            self._exchange.run(lambda peer: scatter.encode_chunk(x_N, peer, wires[peer]))
        return received_RW
