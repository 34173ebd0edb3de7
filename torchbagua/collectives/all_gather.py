"""All-gather: every rank gets all chunks of a flat tensor, of which each rank has one.

Shape suffixes: N elements, W wire bytes, L elements of a chunk.
"""

import torch

from torchbagua.collectives.exchange import Exchange
from torchbagua.collectives.rank_chunks import RankChunks


class AllGather:
    """Each rank encodes its own chunk and sends it to all others, and all decode all chunks, their own one too.

    So all ranks end with the same bits. Between CPUs a chunk is decoded as soon as it is there, while others are under
    way; on a GPU all are decoded at once. Scratch memory, one wire, is the communicator's.

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
        gathering = self.begin(out_N)
        with self.chunks.span("encode", "all_gather", self.chunks.rank):
            self.chunks.compressor.encode(x_L, self.chunks.own_layout, gathering.own_wire)
        gathering.run()

    def begin(self, out_N: torch.Tensor) -> "Gathering":
        """Return a gathering into `out_N`, whose receives may be posted already."""
        return Gathering(self.chunks, out_N)


class Gathering:
    """One all-gather under way: `own_wire` is to be written, then `run`.

    It receives into the wire that a reduce-scatter with the same chunks sends from. It may be made before that is done,
    since a rank sends its mean only when it has received that chunk from everybody.

    Attributes:
        own_wire: memory for the wire of own chunk.
    """

    def __init__(self, chunks: RankChunks, out_N: torch.Tensor) -> None:
        self._chunks = chunks
        self._out_N = out_N
        self._wire_W = chunks.wire(out_N)
        self.own_wire = self._wire_W[chunks.layout.byte_slices[chunks.rank]]
        self._exchange: Exchange | None = None
        if not chunks.nccl_moves_all_at_once:
            wires = [self._wire_W[own_bytes] for own_bytes in chunks.layout.byte_slices]
            self._exchange = Exchange(
                chunks.communicator, "all_gather", wires, chunks.name, counts=chunks.gather_counts
            )

    def post_first_receive(self) -> None:
        """Let the first sender send; worth a call where the caller computes before it runs."""
        if self._exchange is not None:
            self._exchange.post_first_receive()

    def run(self) -> None:
        """Send own chunk's wire, receive the others', and decode all.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        chunks = self._chunks
        if self._exchange is None:
            chunks.all_gather(self._wire_W, self.own_wire)
        elif chunks.are_coded_at_once:
            self._exchange.run(lambda peer: self.own_wire)
        else:
            self._exchange.run(lambda peer: self.own_wire, self._decode)
            self._decode(chunks.rank)
            return
        with chunks.span("decode", "all_gather"):
            chunks.compressor.decode(self._wire_W, chunks.layout, self._out_N)

    def _decode(self, peer: int) -> None:
        chunks = self._chunks
        with chunks.span("decode", "all_gather", peer):
            wire_W = self._wire_W[chunks.layout.byte_slices[peer]]
            chunks.compressor.decode(wire_W, chunks.chunk_layouts[peer], self._out_N[chunks.layout.elements[peer]])
