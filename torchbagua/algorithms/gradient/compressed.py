"""CompressedAllReduce: the mean of gradients, compressed with any codec.

On rank i of n, with the symbols of DoubleSqueeze (Tang et al., arXiv 1905.05957, algorithm 1): codec Q, and residuals
delta_i and delta, which are zero without error feedback. Each rank is the paper's server for one chunk of each bucket.

    g_i = gradient of f_i(x)                                    # backward, on rank i
    for each bucket that backward has filled:                   # on the lane, while backward continues
        v_i = g_i + delta_i
        send Q(v_i), one chunk to each rank
        v = (Q(v_1) + ... + Q(v_n)) / n + delta                 # of the chunk of this rank
        send Q(v) to all ranks; g = Q(v) of all chunks
    x = x - gamma * g                                           # the attached optimizer
    if the step was not skipped:
        delta_i = v_i - Q(v_i); delta = v - Q(v)
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, check_codecs, check_flags, register
from torchbagua.algorithms.gradient.feedback import ErrorFeedback, warn_of_sparse_means
from torchbagua.codecs.base import (
    DEFAULT_BLOCK,
    Compressor,
    Identity,
    MeanCodecs,
    by_name,
    needs_feedback,
)
from torchbagua.codecs.block_codec import check_block
from torchbagua.codecs.minmax_uint8 import MinMaxUInt8
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameter_state import ParameterState, residual_state
from torchbagua.runtime.runner import AlgorithmImpl


class CompressedMean:
    """Appends the mean of compressed gradients to buckets, with or without error feedback."""

    def __init__(
        self, codecs: MeanCodecs, average: bool, feedback: ErrorFeedback[ParameterState[TwoPhaseResiduals]] | None
    ) -> None:
        self._codecs = codecs
        self._average = average
        self._feedback = feedback

    def append(self, bucket: BaguaBucket) -> None:
        """Append the mean, in full precision if the codec does not encode the bucket's dtype."""
        codecs, feedback = self._codecs.for_dtype(bucket.flat.dtype), self._feedback
        # A single rank has no residuals, and full precision has none either.
        if feedback is None or codecs.codec is not self._codecs.codec or bucket.group.size == 1:
            self._append_mean(bucket, codecs)
        else:
            feedback.append(bucket, lambda part: self._append_mean(part, codecs, feedback.state.of_bucket(part)))

    def _append_mean(self, bucket: BaguaBucket, codecs: MeanCodecs, residuals: TwoPhaseResiduals | None = None) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=codecs.hierarchical,
            average=self._average,
            compression=codecs.codec,
            error_feedback=residuals,
            intra_compression=codecs.intra_codec,
        )


class CompressedMeanAlgorithm(Algorithm):
    """Base class of the compressed gradient algorithms. A subclass defines these fields.

    Attributes:
        hierarchical, average, error_feedback: see `CompressedAllReduceAlgorithm`.
    """

    hierarchical: bool
    average: bool
    error_feedback: bool

    @abstractmethod
    def make_codecs(self) -> MeanCodecs:
        """Return the codecs of the mean."""

    def make_codec(self) -> Compressor:
        return self.make_codecs().codec

    def make_shard_codecs(self) -> MeanCodecs | None:
        """Return the codecs of the mean. Raises ValueError with error feedback, and without `average`."""
        name = type(self).__name__
        if self.error_feedback:
            raise ValueError(
                f"{name}: error_feedback must be False for modules on which fully_shard was called, because every rank "
                "would store the residual of all parameters instead of its shard"
            )
        if not self.average:
            raise ValueError(
                f"{name}: average must be True for modules on which fully_shard was called; to sum gradients, call "
                "set_gradient_divide_factor(1) on the module"
            )
        return self.make_codecs()

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback`."""
        return {"error_feedback": self.error_feedback}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn about an optimizer that trains badly if most elements of the mean are zero."""
        codec = self.make_codec()
        if isinstance(codec, SparseCodec) and codec.ratio < 1:
            warn_of_sparse_means(type(self).__name__, optimizers)

    def make_impl(self, runner: GradientRunner) -> AlgorithmImpl:
        return CompressedAllReduceAlgorithmImpl(runner)


@dataclass(frozen=True)
class CompressedAllReduceAlgorithm(CompressedMeanAlgorithm):
    """Average gradients compressed with any codec, by default in 4 bits. The result is bitwise identical on all ranks.

    Each rank encodes its gradient, the mean over ranks is computed, and the mean is encoded again: Q(mean_j Q(g_j)). A
    rank sends about 2 (n-1)/n times the encoded gradient in each step. In 4 bits, that is 4.25 bits per element, 7.5
    times less than a float32 all-reduce sends. complex64 is encoded as pairs of float32. A dtype that the codec does
    not encode, such as float64, is sent in full precision.

    With error feedback, each rank adds the residual of the previous gradient to its gradient. The mean has residuals
    too, which are partitioned among the ranks (DoubleSqueeze, Tang et al., arXiv 1905.05957, algorithm 1).

    - Residuals change when an optimizer's step has used the sent gradients. A step that a GradScaler skips leaves them
      unchanged. With several optimizers, each commits the residuals of its own parameters.
    - They take 8 bytes per parameter, plus 8 bytes per parameter divided by the number of ranks.
    - They are part of `Attachment.state_dict` and differ between ranks. A state can be loaded only with the same
      `error_feedback`; the other arguments may differ.
    - They are stored without the loss scale, so pass the GradScaler with AMP: `attach(..., grad_scaler=scaler)`.
    - Accumulate gradients under `no_sync`, which sends once. Several synchronized backward passes before a step are
      also supported: the residual counts once, at a cost of 4 bytes more per parameter. Each of these passes must then
      reach the same parameters. The first step of a run must have a single synchronized backward, because DDP rebuilds
      its buckets after it. Otherwise, backward raises.
    - With `comm_hook` instead of `attach`, call `reify(group, optimizer=optimizer)`, or call
      `GradientRunner.step_taken` after each step, and pass the scaler to `GradientRunner.use_grad_scaler`.

    Args:
        compression: the name of a codec (see `torchbagua.codecs`), a Compressor, which may be your own, or None for
            full precision.
        hierarchical: with multi-node groups that have several ranks per node, use `intra_compression` within nodes and
            `compression` between them.
        average: divide by the number of ranks. False gives the sum.
        intra_compression: the codec within a node, specified like `compression`; None for full precision. With a single
            node, or a single rank per node, it has no effect: `compression` is used between all ranks. The residuals do
            not include its rounding.
        error_feedback: add the residual to the next gradient.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    compression: str | Compressor | None = "minmax_uint4"
    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    intra_compression: str | Compressor | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_flags(self, "hierarchical", "average", "error_feedback")
        check_codecs(self, "compression", "intra_compression")
        if self.intra_compression is not None and not self.hierarchical:
            raise ValueError(
                f"{name}: intra_compression must be None with hierarchical=False, which ignores nodes, got "
                f"{self.intra_compression!r}"
            )
        if needs_feedback(self.intra_compression):
            raise ValueError(
                f"{name}: intra_compression must not be a codec that needs error feedback, because residuals within "
                f"nodes are not stored; got {self.intra_compression!r}"
            )
        if not self.error_feedback and needs_feedback(self.compression):
            raise ValueError(
                f"{name}: compression {self.compression!r} needs error_feedback=True, because training fails if its "
                "large residuals are lost"
            )

    def make_codecs(self) -> MeanCodecs:
        intra_codec = by_name(self.intra_compression) if self.hierarchical else None
        return MeanCodecs(by_name(self.compression), intra_codec)


class CompressedAllReduceAlgorithmImpl(AlgorithmImpl):
    """See `CompressedAllReduceAlgorithm`."""

    algorithm: CompressedMeanAlgorithm
    runner: GradientRunner

    def __init__(self, runner: GradientRunner) -> None:
        super().__init__(runner)
        has_feedback = self.algorithm.error_feedback
        feedback = ErrorFeedback(self.runner, residual_state(runner.name)) if has_feedback else None
        self._mean = CompressedMean(self.algorithm.make_codecs(), self.algorithm.average, feedback)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        self._mean.append(bucket)


register("compressed_allreduce", CompressedAllReduceAlgorithm, "mean of gradients by any codec, by default in 4 bits")


@dataclass(frozen=True)
class ByteGradAlgorithm(CompressedMeanAlgorithm):
    """Average gradients in 8 bits. The result is bitwise identical on all ranks (Bagua, arXiv 2107.01499).

    It is `CompressedAllReduceAlgorithm` with MinMaxUInt8, and everything in that docstring applies. It computes
    Q(mean_j Q(g_j)). A rank sends about 2 (n-1)/n bytes per element and step, a quarter of what a float32 all-reduce
    sends.

    Args:
        hierarchical, average, error_feedback: see `CompressedAllReduceAlgorithm`. Within nodes, gradients are sent in
            full precision.
        block: the number of elements that share a quantization range, a multiple of 8. A block does not cross a
            parameter's boundary. None gives Bagua's single range per chunk.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK
    error_feedback: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "error_feedback")
        check_block("ByteGradAlgorithm", self.block)

    def make_codecs(self) -> MeanCodecs:
        return MeanCodecs(MinMaxUInt8(self.block), Identity() if self.hierarchical else None)


register("bytegrad", ByteGradAlgorithm, "mean of gradients in 8 bits")
