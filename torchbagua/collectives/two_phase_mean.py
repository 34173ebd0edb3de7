"""The one centralized collective: the two-phase mean, flat or with respect to nodes.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch

from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.error_feedback import ErrorFeedback, Held
from torchbagua.collectives.exchange import Contents, Exchange
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.sampled_values import SAMPLED_ELEMENTS, tell_error, tell_residuals
from torchbagua.compressors import Compressor, Identity
from torchbagua.compressors.blocks import WireLayout, block_bounds, deal_blocks
from torchbagua.compressors.cast import sum_dtype
from torchbagua.events import Phase
from torchbagua.tracer import Span


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
    error_feedback: ErrorFeedback | None = None,
) -> Mean:
    """Return the function that averages a flat tensor over `group`, flat or with respect to nodes.

    In full precision, and on GPUs with NCCL, that is NCCL's all-reduce, which knows of nodes itself.

    Args:
        group: who takes part.
        compressor: how what is sent looks; with `hierarchical`, what is sent between nodes. It encodes `dtype`.
        segment_lengths: elements of the parameters that lie one after the other in the tensor.
        dtype, device: of the tensor.
        hierarchical: average within nodes in full precision first, where there are several nodes with several ranks.
        average: divide the sum by the number of ranks.
        bucket: the tensor's name, for events and errors.
        error_feedback: takes part, for a float32 tensor that is averaged in place.

    Returns:
        A function of the tensor, which leaves the same bits on all ranks. A group of one changes nothing.
    """
    bounds = block_bounds(segment_lengths, compressor.granularity)
    divisor = float(group.size) if average else 1.0
    if group.size == 1:
        return _copy
    if group.has_nccl and device.type == "cuda" and isinstance(compressor, Identity):
        return AllReduceMean(group.world, dtype, device, divisor, bucket)

    def two_phase(communicator: Communicator, own_bounds_B: torch.Tensor, own_dtype: torch.dtype, start: int) -> Mean:
        result = TwoPhaseMean(communicator, compressor, own_bounds_B, own_dtype, device, divisor, bucket)
        if error_feedback is not None:
            result.keep_residuals(error_feedback, start)
        return result

    node = group.intra_node if hierarchical else None
    if node is None:
        mean = two_phase(group.world, bounds, dtype, 0)
    else:

        def make_inner(owners: Communicator, shard: slice, shard_bounds_B: torch.Tensor) -> Mean:
            return two_phase(owners, shard_bounds_B, sum_dtype(dtype), shard.start)

        over_nodes = Hierarchical(group, bounds, dtype, device, make_inner, bucket)

        def mean(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
            _copy(x_N, out_N)
            over_nodes(x_N if out_N is None else out_N)

    if error_feedback is None:
        return mean

    def sum_over(communicator: Communicator, x_N: torch.Tensor) -> torch.Tensor:
        total_N = x_N.clone()  # what is held stays as it is where this fails
        TwoPhaseMean(communicator, Identity(), bounds, total_N.dtype, device, 1.0, bucket)(total_N)
        return total_N

    def mean_with_feedback(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        if (held := error_feedback.held) is not None:
            sent_N = held.sent if node is None else sum_over(node, held.sent)  # a rank holds all that it sends itself
            error_feedback.start_from(Held(sent_N, sum_over(group.world, held.mean)))
        mean(x_N, out_N)

    return mean_with_feedback


def _copy(x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
    if out_N is not None:
        out_N.copy_(x_N)


class TwoPhaseMean:
    """Mean of a flat tensor by scatter and gather, compressed in both phases (ScatterReduce, arXiv 2107.01499).

    1. The tensor's blocks are dealt to one chunk per rank; encode the chunks.
    2. All-to-all: each rank receives its own chunk from all others.
    3. Decode the copies of own chunk, add them in rank order, in float32 or float64, divide, encode again.
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
        lengths = [elements.stop - elements.start for elements in self._layout.elements]
        own_length = [lengths[communicator.rank]] * communicator.size
        self._scattered = Contents(sent=lengths, received=own_length, element_bytes=dtype.itemsize)
        self._gathered = Contents(sent=own_length, received=lengths, element_bytes=dtype.itemsize)
        self._feedback: ErrorFeedback | None = None

    def keep_residuals(self, feedback: ErrorFeedback, start: int = 0) -> None:
        """Add what compression left out before, and keep what it leaves out now.

        The tensor, float32, is then averaged in place, and lies at element `start` of its bucket.
        """
        own = self._layout.elements[self._communicator.rank]
        num_elements = self._layout.elements[-1].stop
        feedback.allot(sent=slice(start, start + num_elements), mean=slice(start + own.start, start + own.stop))
        self._feedback = feedback

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

        def encode_into(wire: torch.Tensor, peer: int) -> torch.Tensor:
            with self._span("encode", "all_to_all", peer):
                if self._feedback is None:
                    compressor.encode(values[peer], self._chunks[peer], wire)
                else:
                    elements = self._layout.elements[peer]
                    self._feedback.sent.encode(values[peer], compressor, self._chunks[peer], wire, elements)
            return wire

        def decode(peer: int) -> None:
            with self._span("decode", "all_gather", peer):
                compressor.decode(mean_wires[peer], self._chunks[peer], means[peer])

        scatter = Exchange(communicator, "all_to_all", list(rows_RW), self._bucket, contents=self._scattered)
        # Made before the chunks of the wire are sent, into which it receives: a rank sends the mean of its chunk only
        # when it has received that chunk from everybody.
        gather = Exchange(communicator, "all_gather", mean_wires, self._bucket, contents=self._gathered)
        scatter.expect()
        encode_into(rows_RW[rank], rank)
        if communicator.tracer.samples and not compressor.in_place:
            self._tell_error(values[rank], rows_RW[rank])
        scatter.run(lambda peer: encode_into(wires[peer], peer))
        gather.expect()
        if row_bytes:
            with self._span("reduce", "all_to_all", rank):
                self._form_mean(rows_RW, means[rank], mean_wires[rank])
        gather.run(lambda peer: mean_wires[rank], decode)
        decode(rank)
        if communicator.tracer.samples and self._feedback is not None:
            tell_residuals(communicator.tracer, self._bucket, self._feedback)

    def _form_mean(self, rows_RW: torch.Tensor, mean_L: torch.Tensor, mean_W: torch.Tensor) -> None:
        """Write the encoded mean of own chunk's copies to `mean_W`; `mean_L` is memory for it."""
        compressor, layout = self._compressor, self._chunks[self._communicator.rank]
        if self._feedback is None:
            compressor.decode_mean_encode(rows_RW, layout, self._divisor, mean_W)
            return
        compressor.decode_mean(rows_RW, layout, self._divisor, mean_L)
        self._feedback.mean.encode(mean_L, compressor, layout, mean_W, slice(0, mean_L.numel()))

    @cached_property
    def _sample(self) -> WireLayout:
        """The beginning of own chunk, of which observers are told; on a GPU its table is waited for."""
        return self._chunks[self._communicator.rank].beginning(SAMPLED_ELEMENTS)

    def _tell_error(self, x_L: torch.Tensor, wire_W: torch.Tensor) -> None:
        """Tell observers what encoding own chunk has left out of it; with error feedback `x_L` may hold anything."""

        def parts() -> tuple[torch.Tensor, torch.Tensor]:
            rank = self._communicator.rank
            elements = self._sample.elements[0]
            decoded_L = torch.empty_like(x_L[elements])
            self._compressor.decode(wire_W, self._sample, decoded_L)
            if self._feedback is None:
                return x_L[elements], x_L[elements].float() - decoded_L
            left_out_L = self._feedback.sent.staged(self._layout.elements[rank])[elements]
            return decoded_L + left_out_L, left_out_L

        tell_error(self._communicator.tracer, self._bucket, parts)

    def _span(self, phase: Phase, operation: str, peer: int) -> Span:
        """Return a phase of the work on the chunk that `peer` owns."""
        num_elements = self._gathered.received[peer]
        return self._communicator.span(
            phase,
            self._bucket,
            operation=operation,
            num_elements=num_elements,
            raw_bytes=num_elements * self._gathered.element_bytes,
            wire_bytes=self._chunks[peer].num_bytes,
        )
