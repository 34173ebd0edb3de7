"""ByteGrad: gradients averaged in eight bits."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.sub_buckets import append_sub_buckets, sub_bucket_of
from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import BaguaProcessGroup, TwoPhaseResiduals
from torchbagua.compressors import DEFAULT_BLOCK, MinMaxUInt8, check_block
from torchbagua.state import ParameterState, residual_state


@dataclass(frozen=True)
class ByteGradAlgorithm(Algorithm):
    """Average gradients in 8 bits; the result is bit-identical on all ranks (Bagua, arXiv 2107.01499).

    Every rank quantises its gradient, the mean of these is formed, and it is quantised again: Q(mean_j Q(g_j)). A rank
    sends about 2 (n-1)/n bytes an element and step, a quarter of what a float32 all-reduce sends. complex64 is coded as
    pairs of float32. float64 and complex128 travel in full precision.

    With error feedback every rank adds to its gradient what compression left out of the one before. The mean has
    residuals too, which are shared out among the ranks (DoubleSqueeze, Tang et al., arXiv 1905.05957, algorithm 1).

    - Residuals change when an optimizer's step has used what was sent. A step that a GradScaler skips leaves them as
      they are. Of several optimizers, each commits those of its own parameters.
    - They take 8 bytes a parameter, and 8 divided by the number of ranks.
    - They are in `Attachment.state_dict`, and differ between ranks. A state can be loaded with the same
      `error_feedback` only; the other arguments may differ.
    - They are kept without the loss scale, so under AMP hand over the GradScaler: `attach(..., grad_scaler=scaler)`.
    - Accumulate under `no_sync`, which sends once. Several synchronised backward passes before a step are possible: the
      residual counts once, for 4 bytes a parameter more. Each of these passes must then reach the same parameters. The
      first step of a run must have one synchronised backward, since DDP forms its buckets anew after it. Otherwise
      backward raises.
    - With `comm_hook` in place of `attach`, give `reify(group, optimizer=optimizer)`, or call `impl.step_taken()` after
      each step, and set `impl.grad_scaler = scaler`.

    Args:
        hierarchical: with several nodes of several ranks: full precision within nodes, 8 bits between them.
        average: divide by the number of ranks; False gives the sum.
        block: how many elements share a quantisation range, a multiple of 8. A block does not cross a parameter's
            boundary. None gives Bagua's one range per chunk.
        error_feedback: add what compression leaves out to what is sent next.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    averages_weights: ClassVar[bool | None] = False

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK
    error_feedback: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "error_feedback")
        check_block("ByteGradAlgorithm", self.block)

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback`."""
        return {"error_feedback": self.error_feedback}

    def make_impl(self, process_group: BaguaProcessGroup) -> "ByteGradAlgorithmImpl":
        return ByteGradAlgorithmImpl(process_group, self)


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """See `ByteGradAlgorithm`."""

    algorithm: ByteGradAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: ByteGradAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self.compressor = MinMaxUInt8(algorithm.block)
        self.parameter_state = residual_state("ByteGradAlgorithm") if algorithm.error_feedback else None

    @property
    def needs_grad_scaler(self) -> bool:
        """True with error feedback: gradients carry the loss scale, which changes, and residuals do not."""
        return self.parameter_state is not None

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        codec = self.codec_for(bucket)
        # One rank leaves nothing out, and neither does full precision.
        if self.parameter_state is None or codec is not self.compressor or self.process_group.size == 1:
            self._append_mean(bucket)
        elif bucket.flat.dtype == torch.float32:
            self._append_mean_with_feedback(bucket, self.parameter_state)
        else:  # a shorter format would round what is added to it
            part = sub_bucket_of(bucket, bucket.tensors, torch.float32)
            self._append_mean_with_feedback(part, self.parameter_state)
            append_sub_buckets(bucket, [part])

    def _append_mean_with_feedback(self, bucket: BaguaBucket, state: ParameterState[TwoPhaseResiduals]) -> None:
        feedback = state.of_bucket(bucket)
        bucket.append_python_op(state.resolve_last_backward)
        bucket.append_python_op(self._unscale)
        self._append_mean(bucket, feedback)
        bucket.append_python_op(self._commit_if_joined)
        bucket.append_python_op(self._restore_scale)

    def _append_mean(self, bucket: BaguaBucket, feedback: TwoPhaseResiduals | None = None) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=self.algorithm.hierarchical,
            average=self.algorithm.average,
            compression=self.codec_for(bucket),
            error_feedback=feedback,
        )

    def _unscale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.loss_scale != 1.0:
            bucket.flat.div_(self.loss_scale)

    def _commit_if_joined(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.has_joined and self.parameter_state is not None:
            self.parameter_state.commit_without_step(bucket)

    def _restore_scale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.loss_scale != 1.0:
            bucket.flat.mul_(self.loss_scale)


register("bytegrad", ByteGradAlgorithm, "mean of gradients in 8 bits")
