"""All-gather: every rank gets all chunks of a flat tensor, of which each rank has one.

Shape suffixes: N elements, W wire bytes, L elements of a chunk.
"""

import itertools

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.value_form import CodecOf


class AllGather:
    """One all-gather: each rank sends its local chunk, encoded, to all others, and all ranks decode all chunks.

    So all ranks end with the same bits. `send` and `receive` work on one piece, so that one is computed while another
    is under way: send all, then receive all.

    Scratch memory, one wire, is the communicator's. It is that which a reduce-scatter with the same chunks sends from.
    An all-gather may be made before that is done, since a rank sends its mean only when it has received that piece from
    everybody.

    Args:
        chunks: the tensor's chunks, and how they lie on the wire.
        out_N: for all chunks.
        pipeline: of the exchanges that are under way with these.
        codec_of: the codecs that decode chunks, if these are not their compressor; see `ValueForm`.
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
        """Return memory for the wire of the local part of a piece, to be written before `send`."""
        return self._wires[piece.index][self._chunks.rank]

    def send(self, piece: Piece, x_L: torch.Tensor | None = None) -> None:
        """Start to send the local part of a piece.

        Args:
            piece: of all chunks.
            x_L: the local part, which is encoded; None if `own_wire` holds it already.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
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
        """Decode a piece of all chunks, each when it has arrived.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        chunks = self._chunks
        if chunks.compressor.wire_is_tensor:  # what has arrived is where it belongs
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


def all_gather(chunks: RankChunks, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
    """Write to `out_N` the chunks of all ranks, of which own one is `x_L`; it may be its place in `out_N`.

    Raises:
        CommunicationError: a peer is gone or did not take part within the group's timeout.
    """
    pipeline = Pipeline(chunks.communicator, chunks.device)
    gather = AllGather(chunks, out_N, pipeline)
    for piece in chunks.pieces:
        gather.send(piece, x_L[piece.within_own])
    for piece in chunks.pieces:
        gather.receive(piece)
    pipeline.wait_for_sends()
