"""All-gather: every rank gets all chunks of a flat tensor, of which each rank has one.

Shape suffixes: N elements, W wire bytes, L elements of a chunk.
"""

import torch

from torchbagua.collectives.exchange import ElementCounts, Exchange
from torchbagua.collectives.wire_rows import WireRows


class AllGather:
    """Each rank encodes its own chunk and sends it to all others, and all decode all chunks, their own one too.

    So all ranks end with the same bits. Between CPUs a chunk is decoded as soon as it is there, while others are under
    way; on a GPU all are decoded at once. Scratch memory, one wire, is the communicator's.

    Args:
        rows: the tensor's chunks, and how they lie on the wire.
    """

    def __init__(self, rows: WireRows) -> None:
        self.rows = rows
        own_length = rows.lengths[rows.rank]
        self._counts = ElementCounts([own_length] * len(rows.lengths), rows.lengths, rows.element_bytes)

    def __call__(self, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
        """Write to `out_N` the chunks of all ranks, of which own one is `x_L`.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        gathering = self.begin(out_N)
        with self.rows.span("encode", "all_gather", self.rows.rank):
            self.rows.compressor.encode(x_L, self.rows.own_layout, gathering.own_wire)
        gathering.run()

    def begin(self, out_N: torch.Tensor) -> "Gathering":
        """Return a gathering into `out_N`, whose receives may be posted already."""
        return Gathering(self.rows, self._counts, out_N)


class Gathering:
    """One all-gather under way: `own_wire` is to be written, then `run`.

    It receives into the wire that a reduce-scatter with the same rows sends from. It may be made before that is done,
    since a rank sends its mean only when it has received that chunk from everybody.

    Attributes:
        own_wire: memory for the wire of own chunk.
    """

    def __init__(self, rows: WireRows, counts: ElementCounts, out_N: torch.Tensor) -> None:
        self._rows = rows
        self._counts = counts
        self._out_N = out_N
        self._wire_W = rows.wire(out_N)
        self.own_wire = self._wire_W[rows.layout.rows[rows.rank]]
        self._exchange: Exchange | None = None
        if not rows.are_equal:
            wires = [self._wire_W[row] for row in rows.layout.rows]
            self._exchange = Exchange(rows.communicator, "all_gather", wires, rows.name, counts=counts)

    def expect(self) -> None:
        """Let the first sender send; worth a call where the caller computes before it runs."""
        if self._exchange is not None:
            self._exchange.expect()

    def run(self) -> None:
        """Send own chunk's wire, receive the others', and decode all.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        rows = self._rows
        if self._exchange is None:
            rows.all_gather(self._wire_W, self.own_wire, self._counts)
        elif rows.are_coded_at_once:
            self._exchange.run(lambda peer: self.own_wire)
        else:
            self._exchange.run(lambda peer: self.own_wire, self._decode)
            self._decode(rows.rank)
            return
        with rows.span("decode", "all_gather"):
            rows.compressor.decode(self._wire_W, rows.layout, self._out_N)

    def _decode(self, peer: int) -> None:
        rows = self._rows
        with rows.span("decode", "all_gather", peer):
            wire_W = self._wire_W[rows.layout.rows[peer]]
            rows.compressor.decode(wire_W, rows.chunks[peer], self._out_N[rows.layout.elements[peer]])
