"""All-gather: each rank contributes one chunk of a flat tensor, and every rank gets all chunks.

Shape suffixes: N elements, W wire bytes, L elements of a chunk.
"""

import itertools

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.value_form import CodecOf


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
