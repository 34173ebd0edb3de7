"""TopK: gradients averaged by the largest elements of each block."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags, register
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedMeanAlgorithm
from torchbagua.algorithms.gradient.compressed_mean import CompressedMean
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.algorithms.gradient.local_momentum import append_local_momentum, check_sgd_without_momentum
from torchbagua.algorithms.gradient.phases import Phases
from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor
from torchbagua.codecs.blockk import BlockK
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.mean_codecs import MeanCodecs
from torchbagua.codecs.sparse import SparseCodec, check_ratio, check_sparse_block
from torchbagua.codecs.topk import TopK
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Momentum
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.parameter_state import residual_state
from torchbagua.runtime.runner import Runner

# Of the warm-up, as in section 3.3 of the paper: from 25 % to 0.1 % each stage sends a quarter of the one before.
_FIRST_RATIO = 0.25
_NUM_STAGES = 4

_SELECTIONS: dict[str, type[SparseCodec]] = {"top": TopK, "block": BlockK}


@dataclass(frozen=True)
class TopKAlgorithm(CompressedMeanAlgorithm):
    """Average gradients by the largest elements of each block, with error feedback, for SGD.

    It is `CompressedAllReduceAlgorithm` with `TopK` and error feedback, and all that is said there is true of it. Of
    the gradient, and of the mean, only the share `ratio` is sent. The rest is added to what is sent next (Aji and
    Heafield, arXiv 1704.05021). A rank sends about 2 (n-1)/n of `ratio * 2.6` bytes an element and step: at 0.01 150
    times less than what a float32 all-reduce sends. The result is bit-identical on all ranks.

    Most elements of what an optimizer then gets are zero in any one step, and stand for many steps in another. Adam,
    which divides by the size of what it gets, trains badly with that. So does SGD with momentum, which takes for new
    what has waited. Give the momentum to this algorithm instead, and take it from the optimizer: each rank then adds up
    velocities, u = m u + g, and sends the largest of their sums (Deep Gradient Compression, Lin et al., arXiv
    1712.01887).

    - Velocities take 8 bytes a parameter, and are in `Attachment.state_dict`. A state can be loaded with the same
      `momentum` only, and with another `ratio`, `warmup_steps` or `block`.
    - A step has one synchronised backward: accumulate under `no_sync`.
    - A group of one rank has the momentum of `torch.optim.SGD`, to the bit.

    Args:
        ratio: the share of elements that is sent, above 0 and at most 1.
        hierarchical, average: see `CompressedAllReduceAlgorithm`. Within nodes full precision is used.
        selection: which elements are sent. "top": the largest of each block. "block": those of the run of neighbours
            with the largest norm, `BlockK`, in half the bytes, but for its place without indices.
        block: how many elements the largest are taken of, a multiple of 8 from 8 to 4096. A block does not cross a
            parameter's boundary, and at least one element of each is sent.
        momentum: m, above 0 and below 1. The optimizer must be `torch.optim.SGD` without momentum. None for none.
        momentum_masking: make the velocity of an element zero when it is sent, so that what is old does not go on
            (section 3.2 of the paper). Without it, what is sent adds up to what SGD with momentum moves by.
        warmup_steps: how many training steps send more: in four stages of equal length the share falls from 0.25
            towards `ratio`, which must be below that. It counts the steps that the optimizer takes: accumulated
            backward passes are one step, and a step that GradScaler skips is none.

    Raises:
        TypeError, ValueError: an argument does not fit.
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

    error_feedback = True  # and no argument: nearly everything is left out

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average", "momentum_masking")
        if self.selection not in list(_SELECTIONS):  # what cannot be hashed neither
            raise ValueError(f"TopKAlgorithm: selection must be one of {sorted(_SELECTIONS)}, got {self.selection!r}")
        check_ratio("TopKAlgorithm", self.ratio)
        check_sparse_block("TopKAlgorithm", self.block)
        if self.momentum is not None and not (isinstance(self.momentum, float | int) and 0 < self.momentum < 1):
            raise ValueError(
                f"TopKAlgorithm: momentum must be None, or a number above 0 and below 1, got {self.momentum!r}"
            )
        check_at_least(self, "warmup_steps", 0)
        if self.warmup_steps and self.ratio >= _FIRST_RATIO:
            raise ValueError(
                f"TopKAlgorithm: warmup_steps must be 0 with a ratio of {_FIRST_RATIO} or more, with which a warm-up "
                f"begins, got {self.warmup_steps} with ratio={self.ratio}"
            )

    def make_codecs(self) -> MeanCodecs:
        return MeanCodecs(_codec(self, _NUM_STAGES), Identity() if self.hierarchical else None)

    make_shard_codecs = Algorithm.make_shard_codecs  # None: it has no argument that switches error feedback off

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback` and `momentum`."""
        return {**super().state_arguments(process_group), "momentum": self.momentum}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError if there is a `momentum`, and the optimizer is not SGD or has one too; warn without one."""
        if self.momentum is None:
            super().check_optimizers(optimizers)
        else:
            check_sgd_without_momentum("TopKAlgorithm", self.momentum, optimizers)

    def check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Warn as others do; but ValueError with a momentum, which uncompressed parameters would not have."""
        if self.momentum is not None and (others := self.uncompressed(parameters)):
            name, parameter = next(iter(others.items()))
            raise ValueError(
                f"TopKAlgorithm: with momentum={self.momentum} all parameters must be of a dtype that "
                f"{self.make_codec()} encodes, got {parameter.dtype}, {name}: sent in full precision it would have none"
            )
        super().check_parameters(parameters)

    def make_impl(self, runner: Runner) -> "TopKAlgorithmImpl":
        return TopKAlgorithmImpl(runner)


def _codec(algorithm: TopKAlgorithm, stage: int) -> Compressor:
    """Return what encodes in a stage of the warm-up: it keeps 0.25 of a block, and geometrically on to `ratio`."""
    ratio = algorithm.ratio
    if stage < _NUM_STAGES:
        # Roots and products, which are the same on all machines: powers need not be.
        factor = math.sqrt(math.sqrt(ratio / _FIRST_RATIO))
        ratio = math.prod([factor] * stage, start=_FIRST_RATIO)
    return _SELECTIONS[algorithm.selection](algorithm.block, ratio)


class TopKAlgorithmImpl(AlgorithmImpl):
    """See `TopKAlgorithm`."""

    algorithm: TopKAlgorithm

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        momentum = None
        if self.algorithm.momentum is not None:
            # One rank sends everything and nothing, and has no need to forget it.
            is_masked = self.algorithm.momentum_masking and runner.process_group.size > 1
            momentum = Momentum(self.algorithm.momentum, is_masked)
        self._feedback = ErrorFeedback(runner, residual_state("TopKAlgorithm", momentum))
        self._warm_up = Phases(runner, self._stage_after)

    def _stage_after(self, num_steps: int) -> int:
        """Return the stage of the warm-up; the last one is what comes after it."""
        num_warm = self.algorithm.warmup_steps
        return min(num_steps * _NUM_STAGES // num_warm, _NUM_STAGES) if num_warm else _NUM_STAGES

    def need_reset(self) -> bool:
        """Count the backward; a scheduler may have given the optimizer a momentum since the last."""
        if self.algorithm.momentum is not None:
            self.algorithm.check_optimizers(self.runner.optimizers)
        return self._warm_up.begin_backward()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        if self.algorithm.momentum is not None and self.runner.process_group.size == 1:
            self._feedback.append(bucket, partial(append_local_momentum, self._feedback.state))
            return
        codec = _codec(self.algorithm, _NUM_STAGES if self._warm_up.current is None else self._warm_up.current)
        codecs = MeanCodecs(codec, self.algorithm.make_codecs().intra_codec)
        CompressedMean(codecs, self.algorithm.average, self._feedback).append(bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return the backward passes and steps so far; the runner saves residuals and velocities."""
        return self._warm_up.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warm_up.load_state_dict(state)


register("topk", TopKAlgorithm, "mean of the largest elements of gradients, for SGD")
