"""PowerSGD: the gradient of a matrix averaged as the product of two factors of low rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch

from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.rank_state import check_rank_state
from torchbagua.algorithms.sub_buckets import append_sub_buckets, sub_bucket_of
from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import (
    BaguaProcessGroup,
    LowRankMean,
    LowRankState,
    MatrixShape,
    matrix_shape,
    require_same_progress,
)
from torchbagua.compressors import Compressor, Identity, by_name
from torchbagua.memory_order import flat_length, shape_in_memory
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.state import ParameterState

_COMPRESSIONS = (None, "bfloat16")
_LARGEST_RANK = 2**15
_COUNT = "num_backward_passes"


@dataclass(frozen=True)
class PowerSGDAlgorithm(Algorithm):
    """Average the gradient of a matrix as a product of two factors (PowerSGD, Vogels et al., arXiv 1905.13727).

    A gradient of n rows and m columns travels as r (n + m) numbers. What the factors leave out of it is kept on each
    rank, and added to its next gradient. The result is bit-identical on all ranks.

    Use it with SGD. Under Adam it costs loss: rank 4 ended 7 % above all-reduce in a run of 240 steps. There,
    QAdamAlgorithm in one bit sends about as little, and ByteGradAlgorithm a quarter, at no such cost.

    - Vectors, and matrices whose factors are not `min_rate` times smaller, travel as they are, in the message of the
      first factor. A tensor of more dimensions is a matrix whose rows are its first dimension.
    - The first `start_step` synchronised backward passes average in full precision, and there are no errors yet. Those
      before a state was saved count, and a new attachment without a state begins with 0.
    - Factors and errors are float32, also of bfloat16 and float16 gradients. complex64 is taken as pairs of float32.
      float64 and complex128 travel in full precision.
    - Errors and factors change when an optimizer's step has used what was sent. A step that a GradScaler skips leaves
      them as they are. NaN or Inf on any rank makes the whole matrix NaN on all ranks, and enters neither.
    - They take 8 bytes a parameter. They are in `Attachment.state_dict`, and errors differ between ranks. A state can
      be loaded with the same `rank`, `min_rate` and `warm_start` only.
    - The rules for GradScaler, `no_sync` and `comm_hook` are those of `ByteGradAlgorithm` with error feedback.

    Args:
        rank: the most vectors of a factor.
        start_step: how many synchronised backward passes come before the first with factors.
        min_rate: how many times fewer the numbers of the factors must be than those of the matrix.
        warm_start: start from the factor of the last step; else from pseudo-random numbers in each step.
        compression: None, or "bfloat16" to send the factors, and what has none, in 16 bits.
        hierarchical: with several nodes of several ranks: add up within nodes in full precision.
        seed: of the pseudo-random numbers that the first factor of each matrix is made of, beside its name.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    averages_weights: ClassVar[bool | None] = False

    rank: int = 4
    start_step: int = 100
    min_rate: float = 2
    warm_start: bool = True
    compression: str | None = None
    _: KW_ONLY
    hierarchical: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_flags(self, "warm_start", "hierarchical")
        _check_integer("rank", self.rank, 1, _LARGEST_RANK)
        _check_integer("start_step", self.start_step, 0)
        _check_integer("seed", self.seed, 0)
        if not isinstance(self.min_rate, int | float) or isinstance(self.min_rate, bool):
            raise TypeError(f"PowerSGDAlgorithm: min_rate must be a number, got {self.min_rate!r}")
        if not 0 < self.min_rate < math.inf:
            raise ValueError(f"PowerSGDAlgorithm: min_rate must be positive and finite, got {self.min_rate!r}")
        if self.compression not in _COMPRESSIONS:
            raise ValueError(f"PowerSGDAlgorithm: compression must be None or 'bfloat16', got {self.compression!r}")

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `rank`, `min_rate` and `warm_start`."""
        return {"rank": self.rank, "min_rate": float(self.min_rate), "warm_start": self.warm_start}

    def make_impl(self, process_group: BaguaProcessGroup) -> "PowerSGDAlgorithmImpl":
        return PowerSGDAlgorithmImpl(process_group, self)


def _check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"PowerSGDAlgorithm: {name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"PowerSGDAlgorithm: {name} must be {allowed}, got {value}")


@dataclass(frozen=True)
class LowRank(Identity):
    """What `uncompressed` asks: which dtypes have factors. Factors are sent by a codec of their own."""

    rank: int = 4

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether there are factors for `dtype`, in float32."""
        return dtype in ELEMENT_TYPES


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """See `PowerSGDAlgorithm`."""

    algorithm: PowerSGDAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: PowerSGDAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self.compressor: Compressor = LowRank(rank=algorithm.rank)
        shapes = {"error": None, "factor": self._factor_shape}
        self._state = ParameterState("PowerSGDAlgorithm", self._make_state, shapes)
        self.parameter_state = self._state
        # Counted by every rank alike, since each is collective: so ranks never differ in what they send.
        self._num_backward_passes = 0
        self._has_factors = False
        self._has_changed_form = False

    @property
    def needs_grad_scaler(self) -> bool:
        """True: gradients carry the loss scale, which changes, and errors do not."""
        return True

    def need_reset(self) -> bool:
        """Return True in the first backward with factors, and the first without."""
        return self._has_changed_form

    def on_backward_begin(self) -> None:
        """Count the backward."""
        has_factors = self._num_backward_passes >= self.algorithm.start_step
        self._has_changed_form = has_factors != self._has_factors
        self._has_factors = has_factors
        self._num_backward_passes += 1

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        if not self._has_factors or self.process_group.size == 1 or not self.compressor.encodes(bucket.flat.dtype):
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif not any(self._shape_of(tensor.parameter) for tensor in bucket.tensors):
            bucket.append_centralized_synchronous_op(
                hierarchical=self.algorithm.hierarchical, compression=self.algorithm.compression
            )
        elif bucket.flat.dtype == torch.float32:
            self._append_low_rank_mean(bucket)
        else:  # a shorter format would round errors and factors
            part = sub_bucket_of(bucket, bucket.tensors, torch.float32)
            self._append_low_rank_mean(part)
            append_sub_buckets(bucket, [part])

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: errors and factors by parameter name, and the backward passes so far."""
        return {**super().state_dict(), _COUNT: self._num_backward_passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, see `AlgorithmImpl.load_state_dict`."""
        check_rank_state(type(self).__name__, state, [*self._state.names, _COUNT], self.process_group)
        count = int(state[_COUNT])
        world = self.process_group.world
        progress = {"as backward passes so far in its state": count}
        self.lane.submit(lambda: require_same_progress(world, progress, "loading the state")).result()
        super().load_state_dict(state)
        self._num_backward_passes = count

    def _append_low_rank_mean(self, bucket: BaguaBucket) -> None:
        mean = LowRankMean(
            self.process_group,
            by_name(self.algorithm.compression),
            bucket.spec,
            self._state.of_bucket(bucket),
            [tensor.name for tensor in bucket.tensors],
            self.algorithm.seed,
            hierarchical=self.algorithm.hierarchical,
        )

        def low_rank_mean(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            # Errors are kept without the loss scale.
            if self.loss_scale != 1.0:
                bucket.flat.div_(self.loss_scale)
            mean(bucket.flat, self._num_backward_passes)
            if self.has_joined:
                self._state.commit_without_step(bucket)
            if self.loss_scale != 1.0:
                bucket.flat.mul_(self.loss_scale)

        bucket.append_python_op(self._state.resolve_last_backward)
        bucket.append_python_op(low_rank_mean)

    def _make_state(self, bucket: BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> LowRankState:
        shapes = [self._shape_of(tensor.parameter) for tensor in bucket.tensors]
        keeps_right = self.algorithm.warm_start
        return LowRankState(bucket.spec.segment_lengths, shapes, bucket.flat.device, held, keeps_right=keeps_right)

    def _shape_of(self, parameter: torch.Tensor) -> MatrixShape | None:
        if not self.compressor.encodes(parameter.dtype.to_real()):
            return None
        shape = shape_in_memory(parameter)
        return matrix_shape(shape, flat_length(parameter), self.algorithm.rank, self.algorithm.min_rate)

    def _factor_shape(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return that of the factor that is kept, without vectors where there is none."""
        shape = self._shape_of(parameter)
        return (0, 0) if shape is None or not self.algorithm.warm_start else (shape.rank, shape.columns)


register("powersgd", PowerSGDAlgorithm, "mean of gradients as products of factors of low rank; for SGD")
