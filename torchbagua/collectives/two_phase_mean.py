"""The two-phase mean: a compressed reduce-scatter, then a compressed all-gather.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.error_feedback import TwoPhaseResiduals, report_residuals
from torchbagua.collectives.exchange import Pipeline
from torchbagua.collectives.first_runs import FirstRuns
from torchbagua.collectives.overlapping import Overlap, OverlappingMean, exhaust
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter
from torchbagua.collectives.value_form import ValueForm
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator


class TwoPhaseMean(OverlappingMean):
    """Mean of a flat tensor: compressed reduce-scatter, then compressed all-gather (ScatterReduce, arXiv 2107.01499).

    1. Reduce-scatter: each rank decodes all copies of its local chunk, sums them in rank order and divides.
    2. The rank encodes the mean of its local chunk, on a CPU in the same pass as part 1, on a GPU with residuals in a
       second pass.
    3. All-gather: each rank decodes all means, that of its local chunk too, so results are bitwise equal on all ranks.

    Between CPUs, long chunks are sent in two pieces, so that a link carries one piece while the other is computed,
    unless the first runs were fast on all ranks.

    Args:
        communicator: the ranks that take part.
        compressor: the codec of the chunks. It must encode the tensor's dtype.
        spec: the tensor.
        divisor: the divisor of the sum.
        residuals: added in both phases; the new residuals are staged there. The tensor must be float32 and averaged in
            place. The mean assigns them the slices that this rank sends and owns.
        start: the element of the residuals' bucket at which the tensor begins.
        form: the form in which values are averaged: encoding converts them to it, and decoding converts the mean back.
            The tensor must be float32 and averaged in place.
        overlap: the state shared with the means with which this mean may overlap; by default it overlaps with none.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        divisor: float,
        *,
        residuals: TwoPhaseResiduals | None = None,
        start: int = 0,
        form: ValueForm | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self._overlap = overlap or Overlap(communicator)
        self._part = self._overlap.next_part()
        self._communicator = communicator
        self._compressor = compressor
        self._spec = spec
        self._divisor = divisor
        self._residuals = residuals
        self._form = form
        self._cuts = cuts = spec.even_cuts(communicator.size, compressor.block_elements)
        if residuals is not None:
            own = slice(*cuts[communicator.rank : communicator.rank + 2])
            residuals.assign_slices(
                sent=slice(start, start + spec.num_elements), mean=slice(start + own.start, start + own.stop)
            )
        self._cut(2 if is_long(communicator, compressor, spec, cuts) else 1)
        sent_bytes = 2 * (communicator.size - 1) / communicator.size * self._chunks.layout.num_bytes
        self._first_runs = FirstRuns(communicator, sent_bytes, spec.name)

    def may_begin(self) -> bool:
        """Return whether it can begin without blocking: between CPUs, after the first runs, while its part is free."""
        is_coded_at_once = self._chunks.are_coded_at_once
        return self._first_runs.are_over and not (is_coded_at_once or self._overlap.is_in_flight(self._part))

    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when all chunks are in flight, and then before each wait for a piece of means.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        if len(self._chunks.pieces) > 1 and self._first_runs.should_disable_pieces():
            self._cut(1)
        pipeline = self._overlap.begin(self._part, x_N.device)
        run = self._run(x_N, x_N if out_N is None else out_N, pipeline)
        if self._first_runs.are_over:
            yield from run
        else:
            with self._first_runs:  # without overlap, to time this mean alone
                exhaust(run)
        self._overlap.end(self._part)
        tracer = self._communicator.tracer
        if self._residuals is not None and tracer.samples:
            report_residuals(tracer, self._spec.name, self._residuals)

    def _run(self, x_N: torch.Tensor, out_N: torch.Tensor, pipeline: Pipeline) -> Iterator[None]:
        chunks = self._chunks
        sent, mean = (None, None) if self._residuals is None else (self._residuals.sent, self._residuals.mean)
        codec_of = None if self._form is None else self._form.codec_of(self._compressor)
        scatter = ReduceScatter(chunks, x_N, pipeline, divisor=self._divisor, residual=sent, codec_of=codec_of)
        gather = AllGather(chunks, out_N, pipeline, codec_of=codec_of)  # now, so that receives are posted early
        for piece in chunks.pieces:
            scatter.send(piece)
        yield
        for piece in chunks.pieces:
            scatter.receive_encoded_mean(piece, gather.own_wire(piece), mean, out_N)
            gather.send(piece)
        for piece in chunks.pieces:
            yield  # everything that this mean sends is in the pipeline
            gather.receive(piece)
        pipeline.wait_for_sends()

    def _cut(self, num_pieces: int) -> None:
        """Cut chunks into this number of pieces. Blocks do not change, so the mean is bitwise the same."""
        cuts = self._cuts
        if num_pieces > 1:
            cuts = self._spec.cuts_within(cuts, num_pieces, self._compressor.block_elements)
        self._chunks = RankChunks(self._communicator, self._compressor, self._spec, cuts, self._part)


def is_long(communicator: Communicator, compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]) -> bool:
    """Return whether the halves of the longest chunk are long messages between CPUs. The same on all ranks."""
    is_coded_at_once = spec.device.type == "cuda" or not communicator.posts_messages(spec.device)
    if is_coded_at_once or not compressor.codes_blocks_alone:
        return False
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    num_bytes = compressor.wire_bytes(longest, -(-longest // compressor.block_elements), spec.dtype)
    return num_bytes > 2 * SMALL_MESSAGE_BYTES
