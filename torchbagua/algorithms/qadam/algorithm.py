"""QAdam: after a warm-up, Adam's momentum travels in 8 bits or in one, and nothing else does."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from torchbagua._description import describe
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
    """Average gradients in full precision while QAdamOptimizer warms up, and compressed momenta after that.

    After the warm-up rank i forms the momentum m_i = b1 m + (1 - b1) g_i from its own gradient g_i. The mean of m_i
    over the ranks is formed as ByteGrad forms that of gradients (1-bit Adam, Tang et al., arXiv 2102.02888; Bagua,
    arXiv 2107.01499). Then `.grad` becomes (mean - b1 m) / (1 - b1), from which the optimizer's step forms the mean
    again. So GradScaler, clipping and whatever else stands between backward and step act on a gradient.

    In 8 bits the norm of `.grad` is that of the mean gradient within some per cent. In one bit it is twice as large or
    many times, since all momenta of a block have one magnitude: clip in the warm-up only. Gradients of float64
    parameters, and of the parameters of other optimizers, are averaged in full precision.

    With error feedback every rank adds to its momentum what compression left out of the one before; the mean has
    residuals too (1-bit Adam, algorithm 1). Memory and rules are those of `ByteGradAlgorithm`, but `comm_hook` needs no
    `optimizer`. A new attachment starts from zero, or from a state with the same `error_feedback` and `compression`.

    Under `torch.distributed.algorithms.Join` a rank that has run out of data takes no more steps, and its momenta
    follow those of the others. They are equal to the bit if the others neither clip gradients nor use a weight decay
    that is not decoupled. Its warm-up stands still: if that of the others ends meanwhile, all ranks raise.

    Args:
        q_adam_optimizer: the optimizer that you attach with it.
        hierarchical: with several nodes of several ranks: full precision within nodes, compressed between them.
        compression: the codec that sends momenta: its name, see `torchbagua.codecs`, or a Compressor, which may be one
            of yours or have other blocks, `MinMaxUInt8(block=512)` for instance. "sign1bit" needs `error_feedback`.
            "topk" and "blockk", which send some elements only, are refused: an element would arrive once in many steps,
            and larger than a step can use.
        error_feedback: add what compression leaves out to what is sent next.

    Raises:
        TypeError, ValueError: an argument does not fit.
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
                "QAdamAlgorithm: compression must not be full precision, in which the mean of momenta is what the mean "
                f"of gradients gives Adam: use GradientAllReduceAlgorithm with Adam; got {self.compression!r}"
            )
        is_one_bit = isinstance(self.compression, Sign1Bit) or self.compression == "sign1bit"
        if needs_feedback(self.compression) and not is_one_bit:
            raise ValueError(
                "QAdamAlgorithm: compression must not be one that sends some elements only: what has waited in a "
                f"residual for many steps arrives at once, and QAdam's bound of a step cuts most of it off; got "
                f"{self.compression!r}"
            )
        if is_one_bit and not self.error_feedback:
            raise ValueError(
                f"QAdamAlgorithm: compression {self.compression!r} needs error_feedback=True: one bit leaves so much "
                "out that training fails where it is lost"
            )

    @classmethod
    def for_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer], **arguments: Any) -> "QAdamAlgorithm":
        """Return the algorithm of the QAdamOptimizer in `optimizers`. Raises ValueError unless there is one."""
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(own) != 1:
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(f"QAdamAlgorithm: by its name it needs exactly one QAdamOptimizer, got {names}")
        return cls(own[0], **arguments)

    def arguments(self) -> dict[str, str]:
        """Return the arguments, and what of the optimizer must be the same on all ranks."""
        options = ("warmup_steps", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
        groups = [[group[option] for option in options] for group in self.q_adam_optimizer.param_groups]
        return {
            **super().arguments(),
            f"q_adam_optimizer ({', '.join(options)} of its groups)": repr(groups),
            "q_adam_optimizer (updates of its parameters so far)": repr(self.q_adam_optimizer.num_updates),
        }

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback`, and with it `compression`, by its name if there is one: blocks may differ."""
        if not self.error_feedback:
            return {"error_feedback": False}
        codec = self.compression
        if isinstance(codec, Compressor):
            text = describe(codec, "QAdamAlgorithm: compression")
            codec = next((name for name, make in REGISTRY.items() if make is type(codec)), text)
        return {"error_feedback": True, "compression": codec}

    def own_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.q_adam_optimizer]

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self.q_adam_optimizer not in optimizers:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer must be the optimizer that is attached, got another one")

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of the optimizer's that are sent in full precision, past their warm-up too."""
        own, codec = {id(parameter) for parameter in self.q_adam_optimizer.parameters}, self.make_codec()
        return {name: one for name, one in parameters.items() if id(one) in own and not encodes_momentum(codec, one)}

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
        runner.needs_grad_scaler = True  # gradients carry the loss scale, and momenta do not
        residuals = None
        if self.algorithm.error_feedback:
            residuals = runner.keep(residual_state("QAdamAlgorithm"), lambda: optimizer.parameters)
        self._momenta = MomentumMean(runner, optimizer, residuals, hierarchical=self.algorithm.hierarchical)
        optimizer.attach_averager(self)
        runner.on_close(lambda: optimizer.detach_averager(self))

    def need_reset(self) -> bool:
        """Return whether other parameters are past their warm-up than in the last backward.

        Ranks compare how far these have come.
        """
        num_updates = self._q_adam.num_updates_past_warmup
        before, self._past_warmup = self._past_warmup, list(num_updates)
        if self.runner.process_group.size > 1:
            self._agreement.compare(parameters_of(self._q_adam)[0].device)
        return before != self._past_warmup

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients, or of momenta; where it is of both kinds, of each apart."""
        past = [tensor for tensor in bucket.tensors if self._sends_momentum(tensor.parameter)]
        if not past or self.runner.process_group.size == 1:  # the mean of one gradient is itself, to the last bit
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif len(past) == len(bucket.tensors) and bucket.flat.dtype == torch.float32:
            self._momenta.append(bucket)
        else:
            rest = [tensor for tensor in bucket.tensors if tensor not in past]
            # Momenta in float32 always: (mean - b1 m) / (1 - b1) would magnify the rounding of a shorter format.
            parts = [sub_bucket_of(bucket, past, torch.float32)]
            if rest:
                parts.append(sub_bucket_of(bucket, rest, bucket.flat.dtype))
            for part in parts:
                self.init_operations(None, part)
            append_sub_buckets(bucket, parts)

    def _sends_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum is sent; in full precision the gradient is, whose mean comes to the same."""
        return self._q_adam.is_past_warmup(parameter) and encodes_momentum(self.runner.codec, parameter)


def encodes_momentum(codec: Compressor, parameter: torch.Tensor) -> bool:
    """Return whether `codec` sends the momentum of `parameter`: not float64's, since momenta are sent in float32."""
    return parameter.dtype in ELEMENT_TYPES and codec.encodes(parameter.dtype)


register("qadam", QAdamAlgorithm, "Adam whose momentum is averaged in 8 bits, or in one, after a warm-up")
