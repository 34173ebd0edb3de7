"""TopK: the mean of gradients, of which only the largest elements of each block are sent.

On rank k of N, with the symbols of Deep Gradient Compression (Lin et al., arXiv 1712.01887, sections 3.1 and 3.2):
velocity u_k, accumulated velocities v_k, and V, the same for the mean (see compressed.py).

    u_k = m u_k + gradient of f_k(w)                            # without momentum, m = 0
    v_k = v_k + u_k
    for each bucket that backward has filled:                   # on the lane, while backward continues
        send sparse(v_k), the largest elements of each block, one chunk to each rank
        V = V + (sparse(v_1) + ... + sparse(v_N)) / N           # of the chunk of this rank
        send sparse(V) to all ranks; g = sparse(V) of all chunks
    w = w - eta * g                                             # the attached optimizer
    if the step was not skipped:
        u_k = 0 where sparse(v_k) != 0                          # momentum factor masking
        v_k = v_k - sparse(v_k); V = V - sparse(V)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags, register
from torchbagua.algorithms.gradient.compressed import CompressedMean, CompressedMeanAlgorithm
from torchbagua.algorithms.gradient.feedback import ErrorFeedback, check_betas
from torchbagua.algorithms.gradient.phases import Phases
from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor, Identity, MeanCodecs
from torchbagua.codecs.blockk import BlockK
from torchbagua.codecs.sparse import SparseCodec, check_ratio, check_sparse_block
from torchbagua.codecs.topk import TopK
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Momentum
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameter_state import ParameterState, residual_state
from torchbagua.runtime.runner import AlgorithmImpl


def check_sgd_without_momentum(owner: str, momentum: float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError, prefixed with `owner`, unless all optimizers are SGD without momentum."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"{owner}: with momentum={momentum} the optimizer must be torch.optim.SGD, got "
                f"{type(optimizer).__name__}"
            )
        own = [group["momentum"] for group in optimizer.param_groups if group["momentum"]]
        if own:
            raise ValueError(
                f"{owner}: with momentum={momentum} SGD's momentum must be 0, because the algorithm applies the "
                f"momentum, got {own[0]}"
            )


def append_local_momentum(state: ParameterState[TwoPhaseResiduals], bucket: BaguaBucket) -> None:
    """Append the momentum operation of a single rank, which applies the whole sum of velocities and sends nothing."""
    residuals = state.of_bucket(bucket)
    everything = slice(0, len(bucket.flat))
    residuals.assign_slices(sent=everything, mean=slice(0, 0))
    codec = Identity()
    layout = codec.layout(bucket.spec, (0, len(bucket.flat)))

    def add_momentum(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if residuals.initial is not None:
            residuals.load_whole(residuals.initial)
        residuals.sent.encode(bucket.flat, codec, layout, bucket.flat.view(torch.uint8), everything)

    bucket.append_local_op(add_momentum)


# The warm-up follows section 3.3 of the paper (arXiv 1712.01887): from 25 % to 0.1 %, each stage sends a quarter of the
# elements that the previous stage sends.
_FIRST_RATIO = 0.25
_NUM_STAGES = 4

_SELECTIONS: dict[str, type[SparseCodec]] = {"top": TopK, "block": BlockK}


@dataclass(frozen=True)
class TopKAlgorithm(CompressedMeanAlgorithm):
    """Average gradients by sending the largest elements of each block, with error feedback.

    For optimizers without momentum: SGD, Muon with momentum 0, AdamW with betas of 0, which steps along the signs.

    It is `CompressedAllReduceAlgorithm` with `TopK` and error feedback, and everything in that docstring applies. Only
    the fraction `ratio` of the gradient's elements, and of the mean's elements, is sent. The other elements form the
    residual, which is added to the next gradient (Aji and Heafield, arXiv 1704.05021). A rank sends about 2 (n-1)/n
    times `ratio * 2.6` bytes per element and step: at 0.01, 150 times less than a float32 all-reduce sends. The result
    is bitwise identical on all ranks.

    In each step, most elements of the mean that the optimizer gets are zero. A nonzero element represents the gradients
    of many steps: the residual is a momentum. An optimizer with a momentum of its own trains badly with such a mean,
    because it treats delayed gradients as new. Adam's second moment would be a mean over zeros too. For SGD, this
    algorithm can have the momentum instead: each rank then accumulates velocities, u = m u + g, and sends the largest
    elements of their sums (Deep Gradient Compression, Lin et al., arXiv 1712.01887).

    - Velocities take 8 bytes per parameter and are part of `Attachment.state_dict`. A state can be loaded only with the
      same `momentum`, but with another `ratio`, `warmup_steps` or `block`.
    - A step must have a single synchronized backward: accumulate gradients under `no_sync`.
    - In a group of one rank, the momentum is bitwise equal to that of `torch.optim.SGD`.

    Args:
        ratio: the fraction of elements that is sent, above 0 and at most 1.
        hierarchical, average: see `CompressedAllReduceAlgorithm`. Within nodes, gradients are sent in full precision.
        selection: which elements are sent. "top": the largest elements of each block. "block": the run of adjacent
            elements with the largest norm (`BlockK`), in half the bytes: the position of the run is sent, but no
            indices.
        block: the number of elements per selection block, a multiple of 8 from 8 to 4096. A block does not cross a
            parameter's boundary. At least one element of each block is sent.
        momentum: m, above 0 and below 1. The optimizer must be `torch.optim.SGD` without momentum. None for no
            momentum.
        momentum_masking: set the velocity of an element to zero when the element is sent, so that stale momentum does
            not persist (section 3.2 of the paper). Without it, the sent values sum to the updates of SGD with momentum.
        warmup_steps: the number of initial training steps that send more elements: the fraction falls from 0.25 towards
            `ratio`, which must be smaller than 0.25, in four stages of equal length. It counts the steps that the
            optimizer takes: accumulated backward passes are one step, and a step that GradScaler skips is not counted.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    ratio: float = 0.01
    _: KW_ONLY
    hierarchical: bool = True
    average: bool = True
    selection: str = "top"
    block: int = DEFAULT_BLOCK
    momentum: float | None = None
    momentum_masking: bool = True
    warmup_steps: int = 0

    error_feedback = True  # not an argument, because most of a gradient becomes the residual

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "momentum_masking")
        if self.selection not in list(_SELECTIONS):  # a list, so that unhashable values are refused too
            raise ValueError(f"TopKAlgorithm: selection must be one of {sorted(_SELECTIONS)}, got {self.selection!r}")
        check_ratio("TopKAlgorithm", self.ratio)
        check_sparse_block("TopKAlgorithm", self.block)
        if self.momentum is not None and not (isinstance(self.momentum, float | int) and 0 < self.momentum < 1):
            raise ValueError(
                f"TopKAlgorithm: momentum must be None or a number above 0 and below 1, got {self.momentum!r}"
            )
        check_at_least(self, "warmup_steps", 0)
        if self.warmup_steps and self.ratio >= _FIRST_RATIO:
            raise ValueError(
                f"TopKAlgorithm: warmup_steps must be 0 with a ratio of {_FIRST_RATIO} or more, the initial ratio of a "
                f"warm-up, got {self.warmup_steps} with ratio={self.ratio}"
            )

    def make_codecs(self) -> MeanCodecs:
        return MeanCodecs(_codec(self, _NUM_STAGES), Identity() if self.hierarchical else None)

    make_shard_codecs = Algorithm.make_shard_codecs  # returns None: error feedback cannot be disabled

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback` and `momentum`."""
        return {**super().state_arguments(process_group), "momentum": self.momentum}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """With `momentum`, raise ValueError if an optimizer is not SGD or has momentum too. Without, only warn."""
        if self.momentum is None:
            super().check_optimizers(optimizers)
        else:
            check_sgd_without_momentum("TopKAlgorithm", self.momentum, optimizers)

    def check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """With `momentum`, raise ValueError for uncompressed parameters, which would get none. Without, warn."""
        if self.momentum is not None and (uncompressed := self.uncompressed(parameters)):
            name, parameter = next(iter(uncompressed.items()))
            raise ValueError(
                f"TopKAlgorithm: with momentum={self.momentum} all parameters must have a dtype that "
                f"{self.make_codec()} encodes, got {parameter.dtype} for {name}, which would be trained without "
                "momentum"
            )
        super().check_parameters(parameters)

    def make_impl(self, runner: GradientRunner) -> "TopKAlgorithmImpl":
        return TopKAlgorithmImpl(runner)


def _codec(algorithm: TopKAlgorithm, stage: int) -> Compressor:
    """Return the codec of a warm-up stage. Its ratio falls geometrically over the stages, from 0.25 to `ratio`."""
    ratio = algorithm.ratio
    if stage < _NUM_STAGES:
        # Square roots and products give the same result on all machines; powers may not.
        factor = math.sqrt(math.sqrt(ratio / _FIRST_RATIO))
        ratio = math.prod([factor] * stage, start=_FIRST_RATIO)
    return _SELECTIONS[algorithm.selection](algorithm.block, ratio)


class TopKAlgorithmImpl(AlgorithmImpl):
    """See `TopKAlgorithm`."""

    algorithm: TopKAlgorithm
    runner: GradientRunner

    def __init__(self, runner: GradientRunner) -> None:
        super().__init__(runner)
        momentum = None
        if self.algorithm.momentum is not None:
            # A single rank applies all velocities and sends nothing, so it does not mask them.
            is_masked = self.algorithm.momentum_masking and runner.process_group.size > 1
            momentum = Momentum(self.algorithm.momentum, is_masked)
        self._feedback = ErrorFeedback(self.runner, residual_state("TopKAlgorithm", momentum))
        self._warm_up = Phases(self.runner, self._stage_after)

    def _stage_after(self, num_steps: int) -> int:
        """Return the stage of the warm-up after `num_steps` steps. The last stage follows the warm-up."""
        num_warm = self.algorithm.warmup_steps
        return min(num_steps * _NUM_STAGES // num_warm, _NUM_STAGES) if num_warm else _NUM_STAGES

    def need_reset(self) -> bool:
        """Count the backward. Check the optimizers again, because a scheduler may have set a momentum since then."""
        if self.algorithm.momentum is not None:
            self.algorithm.check_optimizers(self.runner.optimizers)
        check_betas("TopKAlgorithm", self.runner.optimizers)
        return self._warm_up.begin_backward()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        if self.algorithm.momentum is not None and self.runner.process_group.size == 1:
            self._feedback.append(bucket, partial(append_local_momentum, self._feedback.state))
            return
        codec = _codec(self.algorithm, _NUM_STAGES if self._warm_up.current is None else self._warm_up.current)
        codecs = MeanCodecs(codec, self.algorithm.make_codecs().intra_codec)
        CompressedMean(codecs, self.algorithm.average, self._feedback).append(bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return the backward passes and steps so far. The runner saves residuals and velocities."""
        return self._warm_up.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warm_up.load_state_dict(state)


register("topk", TopKAlgorithm, "mean of the largest elements of gradients, for optimizers without momentum")
