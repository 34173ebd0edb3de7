"""PowerSGD: the gradients of matrices, averaged as products of two low-rank factors.

On worker w, with the symbols of PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2), after `start_step`
steps in full precision, for each matrix in a bucket that backward has filled:

    Delta_w = g_w + e_w
    Q = orthogonalize(Q of the last step)
    P = orthogonalize(mean over w of Delta_w Q)                 # sent together with the vectors of the bucket
    Q = mean over w of Delta_w^T P
    Delta' = P Q^T
    x = x - gamma * Delta'                                      # the attached optimizer, which may have a momentum
    if the step was not skipped:
        e_w = Delta_w - Delta'; keep Q
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags, register
from torchbagua.algorithms.gradient.feedback import ErrorFeedback, adam_among
from torchbagua.algorithms.gradient.phases import Phases
from torchbagua.codecs.base import Identity, by_name
from torchbagua.collectives.low_rank_mean import LowRankMean, LowRankState, MatrixShape, matrix_shape
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.parameters import MemoryOrder, flat_length
from torchbagua.runtime.runner import AlgorithmImpl

_COMPRESSIONS = (None, "bfloat16")
_LARGEST_RANK = 2**15


@dataclass(frozen=True)
class PowerSGDAlgorithm(Algorithm):
    """After `start_step` training steps (by default 100), average gradients of matrices as products of two factors.

    Before that, it averages in full precision, so a shorter run is equivalent to plain DDP (PowerSGD, Vogels et al.,
    arXiv 1905.13727). A gradient with n rows and m columns is sent as r (n + m) numbers. Each rank stores the residual
    that the factors leave out and adds it to its next gradient. The result is bitwise identical on all ranks.

    Use it with SGD. With Adam it increases the loss: rank 4 ended 7 % above all-reduce in a run of 240 steps. With
    Adam, QAdamAlgorithm with one bit sends about as few bytes, and ByteGradAlgorithm sends a quarter of the bytes of
    all-reduce, without this increase.

    - Vectors, and matrices whose factors are not at least `min_rate` times smaller, are sent uncompressed in the
      message of the first factor. A tensor of more than two dimensions is treated as a matrix whose rows are its first
      dimension.
    - The first `start_step` training steps average in full precision, without residuals. Steps before a state was saved
      count. A new attachment without a state starts counting at 0.
    - Factors and residuals are float32, even for bfloat16 and float16 gradients. complex64 is treated as pairs of
      float32. float64 and complex128 are sent in full precision.
    - Residuals and factors change when an optimizer's step has used the sent gradients. A step that a GradScaler skips
      leaves them unchanged. NaN or Inf on any rank makes the whole matrix NaN on all ranks, and enters neither
      residuals nor factors.
    - They take 8 bytes per parameter. They are part of `Attachment.state_dict`, and residuals differ between ranks. A
      state can be loaded only with the same `rank`, `min_rate` and `warm_start`.
    - The rules for GradScaler, `no_sync` and `comm_hook` are those of `ByteGradAlgorithm` with error feedback.

    Args:
        rank: the maximum number of vectors in a factor.
        start_step: the number of training steps before the first step with factors. A shorter run sends what DDP sends.
            It counts the steps that the optimizer takes: accumulated backward passes are one step, and a step that
            GradScaler skips is not counted.
        min_rate: the minimum ratio of the matrix's elements to the factors' elements.
        warm_start: start from the factor of the previous step. If False, start each step from pseudo-random numbers.
        compression: None, or "bfloat16" to send the factors, and parameters without factors, in 16 bits.
        hierarchical: with multi-node groups that have several ranks per node, sum within nodes in full precision.
        seed: the seed, together with the parameter's name, of the pseudo-random first factor of each matrix.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    rank: int = 4
    start_step: int = 100
    min_rate: float = 2
    warm_start: bool = True
    compression: str | None = None
    _: KW_ONLY
    hierarchical: bool = True
    seed: int = 0

    error_feedback = True  # not an argument, because factors leave most of a gradient to the residual

    def __post_init__(self) -> None:
        check_flags(self, "warm_start", "hierarchical")
        check_at_least(self, "rank", 1)
        if self.rank > _LARGEST_RANK:
            raise ValueError(f"PowerSGDAlgorithm: rank must be at most {_LARGEST_RANK}, got {self.rank}")
        check_at_least(self, "start_step", 0)
        check_at_least(self, "seed", 0)
        if not isinstance(self.min_rate, int | float) or isinstance(self.min_rate, bool):
            raise TypeError(f"PowerSGDAlgorithm: min_rate must be a number, got {self.min_rate!r}")
        if not 0 < self.min_rate < math.inf:
            raise ValueError(f"PowerSGDAlgorithm: min_rate must be positive and finite, got {self.min_rate!r}")
        if self.compression not in _COMPRESSIONS:
            raise ValueError(f"PowerSGDAlgorithm: compression must be None or 'bfloat16', got {self.compression!r}")

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `rank`, `min_rate` and `warm_start`."""
        return {"rank": self.rank, "min_rate": float(self.min_rate), "warm_start": self.warm_start}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn about an Adam, with which factors increase the loss."""
        if adam := adam_among(optimizers):
            warn_user(
                f"torchbagua: PowerSGDAlgorithm with {adam} increases the loss, by 7 % in a test of 240 steps. Use "
                "QAdamAlgorithm with one bit, CompressedAllReduceAlgorithm() or ByteGradAlgorithm(), or train with SGD"
            )

    def make_codec(self) -> "LowRank":
        return LowRank(rank=self.rank)

    def make_impl(self, runner: GradientRunner) -> "PowerSGDAlgorithmImpl":
        return PowerSGDAlgorithmImpl(runner)


@dataclass(frozen=True)
class LowRank(Identity):
    """Tells `uncompressed` which dtypes have factors. A separate codec sends the factors."""

    rank: int = 4

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of `dtype` have factors, which are float32."""
        return dtype in ELEMENT_TYPES


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """See `PowerSGDAlgorithm`."""

    algorithm: PowerSGDAlgorithm
    runner: GradientRunner

    def __init__(self, runner: GradientRunner) -> None:
        super().__init__(runner)
        shapes = {"error": None, "factor": self._factor_shape}
        self._feedback = ErrorFeedback(self.runner, ParameterState("PowerSGDAlgorithm", self._make_state, shapes))
        self._warm_up = Phases(self.runner, lambda num_steps: int(num_steps >= self.algorithm.start_step))

    def need_reset(self) -> bool:
        return self._warm_up.begin_backward()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        has_factors = self._warm_up.current == 1 and self.runner.process_group.size > 1
        if not has_factors or not self.runner.codec.encodes(bucket.flat.dtype):
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif not any(self._shape_of(tensor.parameter) for tensor in bucket.tensors):
            bucket.append_centralized_synchronous_op(
                hierarchical=self.algorithm.hierarchical, compression=self.algorithm.compression
            )
        else:
            self._feedback.append(bucket, self._append_low_rank_mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the backward passes and steps so far. The runner saves residuals and factors."""
        return self._warm_up.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warm_up.load_state_dict(state)

    def _append_low_rank_mean(self, bucket: BaguaBucket) -> None:
        mean = LowRankMean(
            bucket.group,
            by_name(self.algorithm.compression),
            bucket.spec,
            self._feedback.state.of_bucket(bucket),
            [tensor.name for tensor in bucket.tensors],
            self.algorithm.seed,
            hierarchical=self.algorithm.hierarchical,
        )

        def low_rank_mean(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat, self._warm_up.num_backward_passes)

        bucket.append_python_op(low_rank_mean)

    def _make_state(self, bucket: BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> LowRankState:
        shapes = [self._shape_of(tensor.parameter) for tensor in bucket.tensors]
        keeps_right = self.algorithm.warm_start
        return LowRankState(bucket.spec.segment_lengths, shapes, bucket.flat.device, held, keeps_right=keeps_right)

    def _shape_of(self, parameter: torch.Tensor) -> MatrixShape | None:
        if not self.runner.codec.encodes(parameter.dtype.to_real()):
            return None
        return matrix_shape(
            MemoryOrder(parameter).sizes, flat_length(parameter), self.algorithm.rank, self.algorithm.min_rate
        )

    def _factor_shape(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return the shape of the stored factor: (0, 0) if none is stored."""
        shape = self._shape_of(parameter)
        return (0, 0) if shape is None or not self.algorithm.warm_start else (shape.rank, shape.columns)


register("powersgd", PowerSGDAlgorithm, "gradients as low-rank factors, after 100 steps in full precision; for SGD")
