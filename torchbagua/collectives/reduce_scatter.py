"""Reduce-scatter: every rank gets the sum, or the mean, of its local chunk of a flat tensor.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

from typing import Any

import torch

from torchbagua.codecs.blocks import WireLayout
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.residuals import Residual
from torchbagua.collectives.value_form import CodecOf

# Wires by the rank that sent them, [R, W]. If the wire is the tensor, a list, since this rank's row is not copied.
Rows = Any


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
        if chunks.error_probe.is_wanted:
            self._report_error(x_N[chunks.own], chunks.wires(self._wire_W)[0][chunks.rank])

    def _encode(self, piece: Piece, owner: int, wire_W: torch.Tensor) -> torch.Tensor:
        """Encode the part of a piece that `owner` owns into `wire_W`, and return `wire_W`."""
        chunks, elements = self._chunks, piece.elements[owner]
        with chunks.span("encode", "all_to_all", piece, owner):
            try:
                self._write_wire(self._x_N[elements], piece.layouts[owner], wire_W, elements)
            except Exception as error:
                raise EncodingFailure(f"centralized_mean in {chunks.compressor!r}", chunks.name, error) from error
        if chunks.error_probe.is_wanted and owner == chunks.rank and piece.index == 0:
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
