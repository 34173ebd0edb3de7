"""The one centralized collective: the two-phase mean, flat or with respect to nodes.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.exchange import Exchange
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.compressors import Compressor
from torchbagua.compressors.blocks import block_bounds, deal_blocks


class Mean(Protocol):
    """Forms the mean (or sum) of a flat tensor over the ranks."""

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` to `out_N`, another tensor like it; by default in place."""
        ...


def centralized_mean(
    group: BaguaProcessGroup,
    compressor: Compressor,
    segment_lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    hierarchical: bool,
    average: bool,
    bucket: str,
) -> Mean:
    """Return the function that averages a flat tensor over `group`, flat or with respect to nodes.

    Args:
        group: who takes part.
        compressor: how what is sent looks; with `hierarchical`, what is sent between nodes.
        segment_lengths: elements of the parameters that lie one after the other in the tensor.
        dtype, device: of the tensor.
        hierarchical: average within nodes in full precision first, where there are several nodes with several ranks.
        average: divide the sum by the number of ranks.
        bucket: the tensor's name, for events and errors.

    Returns:
        A function of the tensor, which leaves the same bits on all ranks. A group of one changes nothing.
    """
    bounds = block_bounds(segment_lengths, compressor.granularity)
    divisor = float(group.size) if average else 1.0
    if group.size == 1:
        return _copy
    if hierarchical and group.intra_node is not None:

        def make_inner(owners: Communicator, shard: slice, shard_bounds_B: torch.Tensor) -> Mean:
            return TwoPhaseMean(owners, compressor, shard_bounds_B, torch.float32, device, divisor, bucket)

        over_nodes = Hierarchical(group, bounds, dtype, device, make_inner, bucket)

        def mean(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
            _copy(x_N, out_N)
            over_nodes(x_N if out_N is None else out_N)

        return mean
    return TwoPhaseMean(group.world, compressor, bounds, dtype, device, divisor, bucket)


def _copy(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
    if out_N is not None:
        out_N.copy_(x_N)


class TwoPhaseMean:
    """Mean of a flat tensor by scatter and gather, compressed in both phases (ScatterReduce, arXiv 2107.01499).

    1. The tensor's blocks are dealt to one chunk per rank; encode the chunks.
    2. All-to-all: each rank receives its own chunk from all others.
    3. Decode the copies of own chunk, add them in float32 in rank order, divide, encode again.
    4. All-gather the encoded means.
    5. Decode them into the tensor. Own chunk too comes from its wire, so all ranks end with the same bits.

    A chunk is encoded just before it is sent and decoded as soon as it is there, while others are under way. Scratch
    memory, about two wires, is the group's.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        bounds_B: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        divisor: float,
        bucket: str,
    ) -> None:
        self._communicator = communicator
        self._compressor = compressor
        self._divisor = divisor
        self._bucket = bucket
        self._device = device
        self._layout = compressor.layout(bounds_B, deal_blocks(bounds_B, communicator.size), dtype, device)
        self._chunks = [self._layout.chunk(rank) for rank in range(communicator.size)]

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        communicator, compressor = self._communicator, self._compressor
        rank, size = communicator.rank, communicator.size
        out_N = x_N if out_N is None else out_N
        if compressor.in_place:
            wire_W, mean_W = x_N.view(torch.uint8), out_N.view(torch.uint8)
        else:
            wire_W = mean_W = communicator.scratch("wire", self._layout.num_bytes, self._device)
        row_bytes = self._chunks[rank].num_bytes
        rows_RW = communicator.scratch("rows", size * row_bytes, self._device).view(size, row_bytes)
        values = [x_N[elements] for elements in self._layout.elements]
        means = [out_N[elements] for elements in self._layout.elements]
        wires = [wire_W[row] for row in self._layout.rows]
        mean_wires = [mean_W[row] for row in self._layout.rows]

        def encode(peer: int) -> torch.Tensor:
            compressor.encode(values[peer], self._chunks[peer], wires[peer])
            return wires[peer]

        def decode(peer: int) -> None:
            compressor.decode(mean_wires[peer], self._chunks[peer], means[peer])

        scatter = Exchange(communicator, "all_to_all", list(rows_RW), self._bucket)
        # Made before the chunks of the wire are sent, into which it receives: a rank sends the mean of its chunk only
        # when it has received that chunk from everybody.
        gather = Exchange(communicator, "all_gather", mean_wires, self._bucket)
        scatter.expect()
        compressor.encode(values[rank], self._chunks[rank], rows_RW[rank])
        scatter.run(encode)
        gather.expect()
        if row_bytes:
            compressor.decode_mean_encode(rows_RW, self._chunks[rank], self._divisor, mean_wires[rank])
        gather.run(lambda peer: mean_wires[rank], decode)
        decode(rank)
