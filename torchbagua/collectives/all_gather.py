"""All-gather: every rank gets all chunks of a flat tensor, of which each rank has one.

Shape suffixes: N elements, W wire bytes, L elements of a chunk.
"""

from collections.abc import Sequence

import torch

from torchbagua.collectives.exchange import Exchange, Stage, run_stages
from torchbagua.collectives.rank_chunks import Piece, RankChunks


class AllGather:
    """Each rank encodes its own chunk and sends it to all others, and all decode all chunks, their own one too.

    So all ranks end with the same bits. Between CPUs this is done piece by piece, each while others are under way.
    Scratch memory, one wire, is the communicator's.

    Args:
        chunks: the tensor's chunks, and how they lie on the wire.
    """

    def __init__(self, chunks: RankChunks) -> None:
        self.chunks = chunks

    def __call__(self, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
        """Write to `out_N` the chunks of all ranks, of which own one is `x_L`.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        self.begin(out_N).run(x_L)

    def begin(self, out_N: torch.Tensor) -> "Gathering":
        """Return a gathering into `out_N`, whose receives may be posted already."""
        return Gathering(self.chunks, out_N)


class Gathering:
    """One all-gather under way.

    It receives into the wire that a reduce-scatter with the same chunks sends from. It may be made before that is done,
    since a rank sends its mean only when it has received that piece from everybody.
    """

    def __init__(self, chunks: RankChunks, out_N: torch.Tensor) -> None:
        self._chunks = chunks
        self._out_N = out_N
        self._wire_W = chunks.wire(out_N)
        self._wires = chunks.wires(self._wire_W)
        self._exchanges: list[Exchange] = []
        if not chunks.are_sent_at_once:
            for piece in chunks.pieces:
                wires, counts = self._wires[piece.index], piece.gather_counts
                self._exchanges.append(
                    Exchange(chunks.communicator, "all_gather", wires, chunks.name, counts=counts, piece=piece.number)
                )

    def post_first_receive(self) -> None:
        """Let the first sender send; worth a call where the caller computes before it runs."""
        for exchange in self._exchanges[:1]:
            exchange.post_receives(1)

    def own_wire(self, piece: Piece) -> torch.Tensor:
        """Return memory for the wire of own part of a piece, which is to be written before that is sent."""
        return self._wires[piece.index][self._chunks.rank]

    def own_part(self, piece: Piece) -> torch.Tensor:
        """Return own part of a piece in the result, which is written when that is decoded: memory until then."""
        return self._out_N[piece.elements[self._chunks.rank]]

    def run(self, x_L: torch.Tensor | None = None) -> None:
        """Send own chunk's wire, receive the others', and decode all.

        Args:
            x_L: own chunk, which is encoded; None where `own_wire` holds it already.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        chunks = self._chunks
        if x_L is not None:
            for piece in chunks.pieces:
                self.encode(x_L[piece.within_own], piece)
        if self._exchanges:
            run_stages(self.stages())
        else:
            chunks.all_gather(self._wire_W, self.own_wire(chunks.pieces[0]))
            self._decode_all()

    def encode(self, x_L: torch.Tensor, piece: Piece) -> None:
        """Write `x_L`, own part of a piece, to its wire."""
        chunks = self._chunks
        with chunks.span("encode", "all_gather", piece, chunks.rank):
            chunks.compressor.encode(x_L, piece.layouts[chunks.rank], self.own_wire(piece))

    def stages(self, after: Sequence[Exchange | None] = (), x_L: torch.Tensor | None = None) -> list[Stage]:
        """Return a stage for each piece.

        Args:
            after: the exchange by which own part of each piece becomes known; default: all are known.
            x_L: own chunk, which is encoded when it is sent; None where `own_wire` holds it by then.
        """
        return [
            self._stage(*one, x_L)
            for one in zip(self._exchanges, self._chunks.pieces, after or [None] * len(self._exchanges), strict=True)
        ]

    def _stage(self, exchange: Exchange, piece: Piece, after: Exchange | None, x_L: torch.Tensor | None) -> Stage:
        chunks, own_wire = self._chunks, self.own_wire(piece)
        if chunks.are_coded_at_once:
            return Stage(exchange, lambda peer: own_wire, on_finished=self._decode_all, after=after)
        to_encode = [] if x_L is None else [x_L[piece.within_own]]

        def encoded() -> torch.Tensor:
            if to_encode:
                self.encode(to_encode.pop(), piece)
            return own_wire

        def place_own() -> None:
            encoded()  # also where there is nobody to send it to
            decode(chunks.rank)

        def decode(owner: int) -> None:
            with chunks.span("decode", "all_gather", piece, owner):
                wire_W, out_L = self._wires[piece.index][owner], self._out_N[piece.elements[owner]]
                chunks.compressor.decode(wire_W, piece.layouts[owner], out_L)

        return Stage(exchange, lambda peer: encoded(), on_sent=place_own, on_received=decode, after=after)

    def _decode_all(self) -> None:
        with self._chunks.span("decode", "all_gather", self._chunks.pieces[0]):
            self._chunks.compressor.decode(self._wire_W, self._chunks.layout, self._out_N)
