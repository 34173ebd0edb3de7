"""The two-phase mean: a reduce-scatter and an all-gather, compressed in both.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.all_gather import AllGather, Gathering
from torchbagua.collectives.error_feedback import TwoPhaseResiduals, tell_residuals
from torchbagua.collectives.exchange import Stage, run_stages
from torchbagua.collectives.first_runs import FirstRuns
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter, Rows, Scattering
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES, Communicator


class TwoPhaseMean:
    """Mean of a flat tensor, compressed when it is scattered and when it is gathered (ScatterReduce, arXiv 2107.01499).

    1. Reduce-scatter: each rank decodes what all ranks have sent of its own chunk, adds it in rank order and divides.
    2. The mean of own chunk is encoded, on a CPU in one pass with that; on a GPU with residuals in a second.
    3. All-gather: all ranks decode all means, of their own chunk too, so they end with the same bits.

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
        part: where means of several tensors are formed over this communicator at the same time, a number for each, see
            `stages`; such a mean is sent in one piece.
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
        part: int | None = None,
    ) -> None:
        self._communicator = communicator
        self._compressor = compressor
        self._spec = spec
        self._divisor = divisor
        self._residuals = residuals
        self._cuts = cuts = spec.even_cuts(communicator.size, compressor.block_elements)
        if residuals is not None:
            own = slice(*cuts[communicator.rank : communicator.rank + 2])
            residuals.assign_slices(
                sent=slice(start, start + spec.num_elements), mean=slice(start + own.start, start + own.stop)
            )
        self._part = part
        is_long_message = communicator.posts_messages(spec.device) and is_long(compressor, spec, cuts)
        self._cut(2 if part is None and is_long_message else 1)
        sent_bytes = 2 * (communicator.size - 1) / communicator.size * self._chunks.layout.num_bytes
        self._first_runs = FirstRuns(communicator, sent_bytes, spec.name)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        if len(self._chunks.pieces) > 1 and self._first_runs.were_fast():
            self._cut(1)
        self._first_runs.run(lambda: self._run(x_N, x_N if out_N is None else out_N))
        tracer = self._communicator.tracer
        if self._residuals is not None and tracer.samples:
            tell_residuals(tracer, self._spec.name, self._residuals)

    def stages(self, x_N: torch.Tensor, out_N: torch.Tensor) -> list[Stage]:
        """Return what `run_stages` forms the mean by, between CPUs, together with the stages of other operations."""
        return self._stages(*self._begin(x_N, out_N))

    def _run(self, x_N: torch.Tensor, out_N: torch.Tensor) -> None:
        scattering, gathering = self._begin(x_N, out_N)
        if self._chunks.are_sent_at_once:
            scattering.run(self._mean_for(gathering))
            gathering.run()
        else:
            run_stages(self._stages(scattering, gathering))

    def _begin(self, x_N: torch.Tensor, out_N: torch.Tensor) -> tuple[Scattering, Gathering]:
        # The second before own chunks are sent, so that receives are posted early; `Gathering` says why it may share
        # their wire.
        return self._scatter.begin(x_N), self._gather.begin(out_N)

    def _stages(self, scattering: Scattering, gathering: Gathering) -> list[Stage]:
        scatters = scattering.stages(self._mean_for(gathering))
        gathers = gathering.stages([stage.exchange for stage in scatters])
        # The second piece is on its way while the first is added up, and so on.
        first, *others = scatters
        pairs = itertools.chain.from_iterable(zip(others, gathers[:-1], strict=True))
        return [first, *pairs, gathers[-1]]

    def _cut(self, num_pieces: int) -> None:
        """Cut chunks into so many pieces. The mean is the same, to the bit, since blocks are."""
        cuts = self._cuts
        if num_pieces > 1:
            cuts = self._spec.cuts_within(cuts, num_pieces, self._compressor.block_elements)
        self._chunks = RankChunks(self._communicator, self._compressor, self._spec, cuts, self._part or 0)
        sent = None if self._residuals is None else self._residuals.sent
        self._scatter = ReduceScatter(self._chunks, divisor=self._divisor, residual=sent)
        self._gather = AllGather(self._chunks)

    def _mean_for(self, gathering: Gathering) -> Callable[[Piece, Rows], None]:
        return lambda piece, rows: self._form_mean(piece, rows, gathering)

    def _form_mean(self, piece: Piece, rows: Rows, gathering: Gathering) -> None:
        """Encode the mean of own part of a piece."""
        own_wire = gathering.own_wire(piece)
        if self._residuals is None:
            self._scatter.decode_mean_encode(piece, rows, own_wire)
            return
        layout, residual, within = piece.layouts[self._chunks.rank], self._residuals.mean, piece.within_own
        self._compressor.decode_mean_encode_feedback(
            rows,
            layout,
            self._divisor,
            residual.added(within),
            own_wire,
            residual.stage(within),
            gathering.own_part(piece),
        )


def is_long(compressor: Compressor, spec: TensorSpec, cuts: Sequence[int]) -> bool:
    """Return whether the halves of the longest chunk are long messages, of CPUs; the same on all ranks."""
    if spec.device.type == "cuda" or not compressor.codes_blocks_alone:
        return False
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    num_bytes = compressor.wire_bytes(longest, -(-longest // compressor.block_elements), spec.dtype)
    return num_bytes > 2 * SMALL_MESSAGE_BYTES
