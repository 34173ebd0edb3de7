"""The two-phase mean: a reduce-scatter and an all-gather, compressed in both.

Shape suffixes: N elements, W wire bytes, R ranks, L elements of a chunk.
"""

import itertools

import torch

from torchbagua.collectives.all_gather import AllGather, Gathering
from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.error_feedback import TwoPhaseResiduals, tell_residuals
from torchbagua.collectives.exchange import run_stages
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter, Rows
from torchbagua.compressors import Compressor, TensorSpec


class TwoPhaseMean:
    """Mean of a flat tensor, compressed when it is scattered and when it is gathered (ScatterReduce, arXiv 2107.01499).

    1. Reduce-scatter: each rank decodes what all ranks have sent of its own chunk, adds it in rank order and divides.
    2. The mean of own chunk is encoded: in one pass with that, with residuals in a second.
    3. All-gather: all ranks decode all means, of their own chunk too, so they end with the same bits.

    Args:
        communicator: whose ranks take part.
        compressor: makes bytes of chunks; it encodes the tensor's dtype.
        spec: the tensor.
        divisor: of the sum.
        residuals: what compression left out before is added in both phases, and what it leaves out now is staged; for
            a float32 tensor that is averaged in place. They are assigned the slices that this rank sends and owns.
        start: the element of the residuals' bucket at which the tensor begins.
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
    ) -> None:
        self._residuals = residuals
        cuts = spec.even_cuts(communicator.size, compressor.block_elements)
        if residuals is not None:
            own = slice(*cuts[communicator.rank : communicator.rank + 2])
            residuals.assign_slices(
                sent=slice(start, start + spec.num_elements), mean=slice(start + own.start, start + own.stop)
            )
        sent = None if residuals is None else residuals.sent
        self._chunks = RankChunks(communicator, compressor, spec, cuts)
        self._scatter = ReduceScatter(self._chunks, divisor=divisor, residual=sent)
        self._gather = AllGather(self._chunks)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        scattering = self._scatter.begin(x_N)
        # Before own chunks are sent, so that receives are posted early; `Gathering` says why it may share their wire.
        gathering = self._gather.begin(x_N if out_N is None else out_N)

        def form_mean(piece: Piece, rows: Rows) -> None:
            self._form_mean(piece, rows, gathering)

        if self._chunks.nccl_moves_all_at_once:
            scattering.run(form_mean)
            gathering.run()
        else:
            scatters = scattering.stages(form_mean)
            gathers = gathering.stages([stage.exchange for stage in scatters])
            # The second piece is on its way while the first is added up, and so on.
            first, *others = scatters
            pairs = [*itertools.chain.from_iterable(zip(others, gathers[:-1], strict=True))]
            run_stages([first, *pairs, gathers[-1]])
        tracer = self._chunks.communicator.tracer
        if self._residuals is not None and tracer.samples:
            tell_residuals(tracer, self._chunks.name, self._residuals)

    def _form_mean(self, piece: Piece, rows: Rows, gathering: Gathering) -> None:
        """Encode the mean of own part of a piece."""
        own_wire = gathering.own_wire(piece)
        if self._residuals is None:
            self._scatter.decode_mean_encode(piece, rows, own_wire)
            return
        mean_L = gathering.own_part(piece)
        self._scatter.decode_mean(piece, rows, mean_L)
        layout = piece.layouts[self._chunks.rank]
        self._residuals.mean.encode(mean_L, self._chunks.compressor, layout, own_wire, piece.within_own)
