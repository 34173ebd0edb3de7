"""QAdam: after a warm-up, ranks send only Adam's momentum, in 8 bits or in one bit."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from torchbagua._stable_repr import stable_repr
from torchbagua.algorithms.base import Algorithm, check_codecs, check_flags, register
from torchbagua.algorithms.qadam.momentum_mean import MomentumMean
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.algorithms.qadam.warmup_agreement import WarmupAgreement
from torchbagua.codecs.base import REGISTRY, Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.codecs.sign1bit import Sign1Bit
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.optimizer_steps import parameters_of, unwrap
from torchbagua.runtime.parameter_state import residual_state
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.sub_buckets import append_sub_buckets, sub_bucket_of

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Average gradients in full precision while QAdamOptimizer warms up, and compressed momenta after the warm-up.

    After the warm-up, rank i computes the momentum m_i = b1 m + (1 - b1) g_i from its own gradient g_i. The mean of m_i
    over the ranks is computed as ByteGrad computes the mean of gradients (1-bit Adam, Tang et al., arXiv 2102.02888;
    Bagua, arXiv 2107.01499). Then `.grad` is set to (mean - b1 m) / (1 - b1), from which the optimizer's step
    reconstructs the mean. So GradScaler, clipping and other code that runs between backward and step act on a gradient.

    In 8 bits, the norm of `.grad` is within a few percent of the norm of the mean gradient. In one bit, it is two to
    many times as large, because all momenta of a block have the same magnitude: clip only during the warm-up. Gradients
    of float64 parameters, and of parameters of other optimizers, are averaged in full precision.

    With error feedback, each rank adds the residual of its previous momentum to its momentum. The mean has residuals
    too (1-bit Adam, algorithm 1). Memory and rules are those of `ByteGradAlgorithm`, except that `comm_hook` needs no
    `optimizer`. A new attachment starts from zero, or from a state with the same `error_feedback` and `compression`.

    With `torch.distributed.algorithms.Join`, a rank that has run out of data takes no more steps, and its momenta
    follow those of the other ranks. They are bitwise equal if the other ranks neither clip gradients nor use a weight
    decay that is not decoupled. The warm-up of the joined rank is frozen: if the warm-up of the other ranks ends
    meanwhile, all ranks raise.

    Args:
        q_adam_optimizer: the optimizer that you attach together with this algorithm.
        hierarchical: with multi-node groups that have several ranks per node, use full precision within nodes and
            compression between them.
        compression: the codec for momenta: its name (see `torchbagua.codecs`) or a Compressor, which may be your own or
            have other blocks, such as `MinMaxUInt8(block=512)`. "sign1bit" needs `error_feedback`. "topk" and "blockk",
            which send only part of the elements, are refused: an element would arrive once in many steps, and larger
            than a step can use.
        error_feedback: add the residual to the next momentum.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    q_adam_optimizer: QAdamOptimizer = field(repr=False)
    hierarchical: bool = True
    _: KW_ONLY
    compression: str | Compressor = "minmax_uint8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_adam_optimizer", unwrap(self.q_adam_optimizer))
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise ValueError(
                f"QAdamAlgorithm: q_adam_optimizer must be a QAdamOptimizer, got {type(self.q_adam_optimizer).__name__}"
            )
        check_flags(self, "hierarchical", "error_feedback")
        self._check_compression()

    def _check_compression(self) -> None:
        check_codecs(self, "compression")
        if self.compression is None or isinstance(self.compression, Identity):
            raise ValueError(
                f"QAdamAlgorithm: compression must not be full precision, got {self.compression!r}; use the equivalent "
                "GradientAllReduceAlgorithm with Adam"
            )
        is_one_bit = isinstance(self.compression, Sign1Bit) or self.compression == "sign1bit"
        if needs_feedback(self.compression) and not is_one_bit:
            raise ValueError(
                "QAdamAlgorithm: compression must not be a codec that sends only part of the elements, because QAdam's "
                f"step bound would clip most of the value that a residual accumulates over many steps; got "
                f"{self.compression!r}"
            )
        if is_one_bit and not self.error_feedback:
            raise ValueError(
                f"QAdamAlgorithm: compression {self.compression!r} needs error_feedback=True, because training fails "
                "if the large residuals of one bit are lost"
            )

    @classmethod
    def for_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer], **arguments: Any) -> "QAdamAlgorithm":
        """Return the algorithm for the QAdamOptimizer in `optimizers`. Raises ValueError unless exactly one exists."""
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(own) != 1:
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(
                f"QAdamAlgorithm: attach by name needs exactly one QAdamOptimizer, got {names}; create the "
                "optimizer as torchbagua.QAdamOptimizer, or convert an Adam with QAdamOptimizer.wrap(optimizer)"
            )
        return cls(own[0], **arguments)

    def arguments(self) -> dict[str, str]:
        """Return the arguments, and the optimizer's options and progress, which must be equal on all ranks."""
        options = ("warmup_steps", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
        groups = [[group[option] for option in options] for group in self.q_adam_optimizer.param_groups]
        return {
            **super().arguments(),
            f"q_adam_optimizer ({', '.join(options)} of its groups)": repr(groups),
            "q_adam_optimizer (updates of its parameters so far)": repr(self.q_adam_optimizer.num_updates),
        }

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback` and, if it is True, the name of the codec if it has one, since blocks may differ."""
        if not self.error_feedback:
            return {"error_feedback": False}
        codec = self.compression
        if isinstance(codec, Compressor):
            text = stable_repr(codec, "QAdamAlgorithm: compression")
            codec = next((name for name, make in REGISTRY.items() if make is type(codec)), text)
        return {"error_feedback": True, "compression": codec}

    def own_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.q_adam_optimizer]

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self.q_adam_optimizer not in optimizers:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer must be the attached optimizer, got another optimizer")

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the optimizer's parameters that are sent in full precision even after their warm-up."""
        own, codec = {id(parameter) for parameter in self.q_adam_optimizer.parameters}, self.make_codec()
        return {
            name: parameter
            for name, parameter in parameters.items()
            if id(parameter) in own and not encodes_momentum(codec, parameter)
        }

    def make_impl(self, runner: Runner) -> "QAdamAlgorithmImpl":
        return QAdamAlgorithmImpl(runner)


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See `QAdamAlgorithm`."""

    algorithm: QAdamAlgorithm

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._q_adam = optimizer = self.algorithm.q_adam_optimizer
        self._past_warmup: list[int] = []
        self._agreement = WarmupAgreement(runner, optimizer)
        runner.needs_grad_scaler = True  # gradients contain the loss scale, momenta do not
        residuals = None
        if self.algorithm.error_feedback:
            residuals = runner.keep(residual_state("QAdamAlgorithm"), lambda: optimizer.parameters)
        self._momenta = MomentumMean(runner, optimizer, residuals, hierarchical=self.algorithm.hierarchical)
        optimizer.attach_averager(self)
        runner.on_close(lambda: optimizer.detach_averager(self))

    def need_reset(self) -> bool:
        """Return whether the set of parameters past their warm-up has changed since the last backward.

        The ranks also compare the progress of these parameters.
        """
        num_updates = self._q_adam.num_updates_past_warmup
        before, self._past_warmup = self._past_warmup, list(num_updates)
        if self.runner.process_group.size > 1:
            self._agreement.compare(parameters_of(self._q_adam)[0].device)
        return before != self._past_warmup

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients or of momenta. If a bucket contains both, append two separate means."""
        past = [tensor for tensor in bucket.tensors if self._sends_momentum(tensor.parameter)]
        if not past or self.runner.process_group.size == 1:  # the mean of a single gradient is bitwise that gradient
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif len(past) == len(bucket.tensors) and bucket.flat.dtype == torch.float32:
            self._momenta.append(bucket)
        else:
            uncompressed = [tensor for tensor in bucket.tensors if tensor not in past]
            # Momenta are always float32: (mean - b1 m) / (1 - b1) would magnify the rounding of a shorter format.
            parts = [sub_bucket_of(bucket, past, torch.float32)]
            if uncompressed:
                parts.append(sub_bucket_of(bucket, uncompressed, bucket.flat.dtype))
            for part in parts:
                self.init_operations(None, part)
            append_sub_buckets(bucket, parts)

    def _sends_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum is sent. In full precision, the gradient is sent, which is equivalent."""
        return self._q_adam.is_past_warmup(parameter) and encodes_momentum(self.runner.codec, parameter)


def encodes_momentum(codec: Compressor, parameter: torch.Tensor) -> bool:
    """Return whether `codec` encodes the momentum of `parameter`. False for float64, since momenta are float32."""
    return parameter.dtype in ELEMENT_TYPES and codec.encodes(parameter.dtype)


register("qadam", QAdamAlgorithm, "Adam, with momentum averaged in 8 bits or one bit after a warm-up")
