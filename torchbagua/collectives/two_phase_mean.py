"""The two-phase mean: a reduce-scatter and an all-gather, compressed in both.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.error_feedback import TwoPhaseResiduals, tell_residuals
from torchbagua.collectives.exchange import Pipeline
from torchbagua.collectives.first_runs import FirstRuns
from torchbagua.collectives.overlapping import Overlap, OverlappingMean, exhaust
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter
from torchbagua.collectives.value_form import ValueForm
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator


class TwoPhaseMean(OverlappingMean):
    """Mean of a flat tensor, compressed when it is scattered and when it is gathered (ScatterReduce, arXiv 2107.01499).

    1. Reduce-scatter: each rank decodes all copies of its local chunk, sums them in rank order and divides.
    2. The mean of the local chunk is encoded, on a CPU in one pass with that; on a GPU with residuals in a second.
    3. All-gather: all ranks decode all means, of their local chunk too, so they end with the same bits.

    Between CPUs long chunks are sent in two pieces, so that a link carries one while the other is computed; unless the
    first runs were fast on all ranks.

    Args:
        communicator: whose ranks take part.
        compressor: makes bytes of chunks; it encodes the tensor's dtype.
        spec: the tensor.
        divisor: of the sum.
        residuals: what compression left out before is added in both phases, and what it leaves out now is staged; for
            a float32 tensor that is averaged in place. They are assigned the slices that this rank sends and owns.
        start: the element of the residuals' bucket at which the tensor begins.
        form: that of the values that are averaged, which they are given when they are encoded, and the mean is given
            back its own when it is decoded; for a float32 tensor that is averaged in place.
        overlap: what it shares with other means, beside which it may begin; by default nothing.
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
        """Return whether it begins without a wait: between CPUs, once the first runs are over, in memory of its own."""
        is_coded_at_once = self._chunks.are_coded_at_once
        return self._first_runs.are_over and not (is_coded_at_once or self._overlap.is_under_way(self._part))

    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Form the mean, and yield when all chunks are on their way, and then before each wait for a piece of means.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        if len(self._chunks.pieces) > 1 and self._first_runs.were_fast():
            self._cut(1)
        pipeline = self._overlap.begin(self._part, x_N.device)
        run = self._run(x_N, x_N if out_N is None else out_N, pipeline)
        if self._first_runs.are_over:
            yield from run
        else:
            with self._first_runs:  # alone, for the time that it takes by itself
                exhaust(run)
        self._overlap.end(self._part)
        tracer = self._communicator.tracer
        if self._residuals is not None and tracer.samples:
            tell_residuals(tracer, self._spec.name, self._residuals)

    def _run(self, x_N: torch.Tensor, out_N: torch.Tensor, pipeline: Pipeline) -> Iterator[None]:
        chunks = self._chunks
        sent, mean = (None, None) if self._residuals is None else (self._residuals.sent, self._residuals.mean)
        codec_of = None if self._form is None else self._form.codec_of(self._compressor)
        scatter = ReduceScatter(chunks, x_N, pipeline, divisor=self._divisor, residual=sent, codec_of=codec_of)
        gather = AllGather(chunks, out_N, pipeline, codec_of=codec_of)  # by now, so that receives are posted early
        for piece in chunks.pieces:
            scatter.send(piece)
        yield
        for piece in chunks.pieces:
            scatter.receive_encoded_mean(piece, gather.own_wire(piece), mean, out_N)
            gather.send(piece)
        for piece in chunks.pieces:
            yield  # all that this mean sends is in the pipeline
            gather.receive(piece)
        pipeline.wait_for_sends()

    def _cut(self, num_pieces: int) -> None:
        """Cut chunks into so many pieces. The mean is the same, to the bit, since blocks are."""
        cuts = self._cuts
        if num_pieces > 1:
            cuts = self._spec.cuts_within(cuts, num_pieces, self._compressor.block_elements)
        self._chunks = RankChunks(self._communicator, self._compressor, self._spec, cuts, self._part)


def is_long(communicator: Communicator, compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]) -> bool:
    """Return whether the halves of the longest chunk are long messages, of CPUs; the same on all ranks."""
    is_coded_at_once = spec.device.type == "cuda" or not communicator.posts_messages(spec.device)
    if is_coded_at_once or not compressor.codes_blocks_alone:
        return False
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    num_bytes = compressor.wire_bytes(longest, -(-longest // compressor.block_elements), spec.dtype)
    return num_bytes > 2 * SMALL_MESSAGE_BYTES
