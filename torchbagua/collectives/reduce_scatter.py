"""Reduce-scatter: every rank gets the sum, or the mean, of its own chunk of a flat tensor.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchbagua.codecs.blocks import WireLayout
from torchbagua.collectives.encoding_error import EncodingErrorProbe
from torchbagua.collectives.exchange import Exchange, Stage, run_stages
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.residuals import Residual

# Wires by the rank that they come from, [R, W]. Where the wire is the tensor, a list: own row stays where it is.
Rows = Any


class ReduceScatter:
    """Chunks are encoded and sent to the ranks that own them, which decode and add up what they receive.

    1. Encode the chunks.
    2. All-to-all: each rank receives its own chunk from all others.
    3. Decode the copies of own chunk, add them in rank order, in float32 or float64, divide.

    Between CPUs this is done piece by piece, each while others are under way. Scratch memory, one wire and the chunks
    that are received, is the communicator's.

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
            chunks.communicator.tracer, chunks.compressor, chunks.pieces[0].layouts[chunks.rank], chunks.name
        )

    def __call__(self, x_N: torch.Tensor, out_L: torch.Tensor) -> None:
        """Write the mean of own chunk to `out_L`, in the dtype that sums are formed in.

        `x_N` is left as it is, unless there is a residual: then what it holds afterwards is not defined.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        self.begin(x_N).run(lambda piece, rows: self.decode_mean(piece, rows, out_L[piece.within_own]))

    def begin(self, x_N: torch.Tensor) -> "Scattering":
        """Return a scattering of `x_N`, whose receives may be posted already."""
        return Scattering(self, x_N)

    def decode_mean(self, piece: Piece, rows: Rows, out_L: torch.Tensor) -> None:
        """Write the mean of own part of a piece to `out_L`, in the dtype that sums are formed in."""
        self.chunks.compressor.decode_mean(rows, piece.layouts[self.chunks.rank], self._divisor, out_L)

    def decode_mean_encode(self, piece: Piece, rows: Rows, wire_W: torch.Tensor) -> None:
        """Encode the mean of own part of a piece into `wire_W`."""
        self.chunks.compressor.decode_mean_encode(rows, piece.layouts[self.chunks.rank], self._divisor, wire_W)

    def encode_all(self, x_N: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Encode all chunks into `wire_W`."""
        piece = self.chunks.pieces[0]
        with self.chunks.span("encode", "all_to_all", piece):
            self._encode(x_N, self.chunks.layout, wire_W, slice(0, x_N.numel()))
        if self._error_probe.is_wanted:
            self._tell_error(x_N[self.chunks.own], self.chunks.wires(wire_W)[0][self.chunks.rank])

    def encode_piece(self, x_N: torch.Tensor, piece: Piece, owner: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the part of a piece that `owner` owns into `wire_W`, and return that."""
        elements = piece.elements[owner]
        with self.chunks.span("encode", "all_to_all", piece, owner):
            self._encode(x_N[elements], piece.layouts[owner], wire_W, elements)
        if self._error_probe.is_wanted and owner == self.chunks.rank and piece.index == 0:
            self._tell_error(x_N[elements], wire_W)
        return wire_W

    def _encode(self, x_L: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor, elements: slice) -> None:
        if self._residual is None:
            self.chunks.compressor.encode(x_L, layout, wire_W)
        else:
            self._residual.encode(x_L, self.chunks.compressor, layout, wire_W, elements)

    def _tell_error(self, x_L: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Tell observers what encoding the beginning of own chunk has left out of it."""
        self._error_probe.tell(x_L, wire_W, None if self._residual is None else self._residual.staged(self.chunks.own))


class Scattering:
    """One reduce-scatter under way, up to the sum."""

    def __init__(self, scatter: ReduceScatter, x_N: torch.Tensor) -> None:
        chunks = scatter.chunks
        self._scatter = scatter
        self._x_N = x_N
        self._wire_W = chunks.wire(x_N)
        self._received = chunks.received(x_N.device)
        self._exchanges: list[Exchange] = []
        if not chunks.are_sent_at_once:
            for piece, received_RW in zip(chunks.pieces, self._received, strict=True):
                receives, counts = list(received_RW), piece.scatter_counts
                self._exchanges.append(
                    Exchange(
                        chunks.communicator, "all_to_all", receives, chunks.name, counts=counts, piece=piece.number
                    )
                )
            self._exchanges[0].post_receives(1)

    def run(self, take: Callable[[Piece, Rows], None]) -> None:
        """Encode and send the chunks, and have `take` form the sum of each piece of own chunk.

        Args:
            take: called with the piece and the wires of its own part, by the rank that they come from.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        chunks = self._scatter.chunks
        if self._exchanges:
            run_stages(self.stages(take))
            return
        self._scatter.encode_all(self._x_N, self._wire_W)
        chunks.all_to_all(self._received[0], self._wire_W)
        self._take(take, chunks.pieces[0], self._received[0])

    def stages(self, take: Callable[[Piece, Rows], None]) -> list[Stage]:
        """Return a stage for each piece: see `run`."""
        if self._scatter.chunks.are_coded_at_once:
            self._scatter.encode_all(self._x_N, self._wire_W)
        return [
            self._stage(exchange, piece, received_RW, take)
            for exchange, piece, received_RW in zip(
                self._exchanges, self._scatter.chunks.pieces, self._received, strict=True
            )
        ]

    def _stage(
        self, exchange: Exchange, piece: Piece, received_RW: torch.Tensor, take: Callable[[Piece, Rows], None]
    ) -> Stage:
        scatter, chunks = self._scatter, self._scatter.chunks
        own, wires = chunks.rank, chunks.wires(self._wire_W)[piece.index]

        def send(peer: int) -> torch.Tensor:
            return (
                wires[peer] if chunks.are_coded_at_once else scatter.encode_piece(self._x_N, piece, peer, wires[peer])
            )

        def place_own() -> None:
            if chunks.are_coded_at_once:
                received_RW[own].copy_(wires[own])
            elif not chunks.compressor.wire_is_tensor:
                scatter.encode_piece(self._x_N, piece, own, received_RW[own])

        def finish() -> None:
            rows: Rows = received_RW
            if chunks.compressor.wire_is_tensor:
                rows = [*received_RW[:own], wires[own], *received_RW[own + 1 :]]
            self._take(take, piece, rows)

        return Stage(exchange, send, on_sent=place_own, on_finished=finish)

    def _take(self, take: Callable[[Piece, Rows], None], piece: Piece, rows: Rows) -> None:
        if piece.layouts[self._scatter.chunks.rank].num_bytes:
            with self._scatter.chunks.span("reduce", "all_to_all", piece, self._scatter.chunks.rank):
                take(piece, rows)
