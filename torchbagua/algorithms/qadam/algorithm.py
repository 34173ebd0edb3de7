"""QAdam: after a warm-up, Adam's momentum travels in 8 bits or in one, and nothing else does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch

from torchbagua._description import describe
from torchbagua.algorithms.base import Algorithm, check_codecs, check_flags, register
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.optimizer_steps import parameters_of, unwrap
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.codecs.base import REGISTRY, Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.codecs.sign1bit import Sign1Bit
from torchbagua.collectives.agreement import require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import residual_state
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

    def make_impl(self, process_group: BaguaProcessGroup) -> "QAdamAlgorithmImpl":
        return QAdamAlgorithmImpl(process_group, self)


def encodes_momentum(codec: Compressor, parameter: torch.Tensor) -> bool:
    """Return whether `codec` sends the momentum of `parameter`: not float64's, since momenta are sent in float32."""
    return parameter.dtype in ELEMENT_TYPES and codec.encodes(parameter.dtype)


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See `QAdamAlgorithm`."""

    algorithm: QAdamAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: QAdamAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self.q_adam = algorithm.q_adam_optimizer
        self.parameter_state = residual_state("QAdamAlgorithm") if algorithm.error_feedback else None
        self._past_warmup: list[int] = []
        self._has_changed_kinds = False  # which travel as momenta, since the last backward
        self.q_adam.attach_averager(self)

    @property
    def needs_grad_scaler(self) -> bool:
        """True: gradients carry the loss scale, and momenta do not."""
        return True

    def need_reset(self) -> bool:
        """Return True where other parameters are past their warm-up than in the last backward."""
        return self._has_changed_kinds

    def on_backward_begin(self) -> None:
        """Look which parameters are past their warm-up, and compare over the ranks how far these have come."""
        num_updates = self.q_adam.num_updates_past_warmup
        before, self._past_warmup = self._past_warmup, list(num_updates)
        self._has_changed_kinds = before != self._past_warmup
        if self.process_group.size > 1:
            # Each time: what is sent may change its form after the warm-up too, by a state that is loaded, and a rank
            # that has not loaded it does not know.
            must_agree = {
                "parameters past their warm-up": len(num_updates),
                "updates of parameters past their warm-up": sum(num_updates.values()),
            }
            world, watch = self.process_group.world, self.gradient_buckets.layout_watch
            message = watch.message(world.rank, world.size)

            def compare() -> None:
                check = partial(watch.check, size=world.size)
                require_same_progress(world, must_agree, "the gradients", message, check)

            # Where it fails the lane ends, and this backward's buckets raise it.
            in_step = self.lane.submit(compare)
            device = parameters_of(self.q_adam)[0].device
            if world.in_stream_order(device):  # what is launched there does not wait for its turn in the lane
                in_step.result()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients, or of momenta; where it is of both kinds, of each apart."""
        past = [tensor for tensor in bucket.tensors if self._sends_momentum(tensor.parameter)]
        if not past or self.process_group.size == 1:  # the mean of one gradient is itself, to the last bit
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif len(past) == len(bucket.tensors) and bucket.flat.dtype == torch.float32:
            self._append_mean_of_momenta(bucket)
        else:
            rest = [tensor for tensor in bucket.tensors if tensor not in past]
            # Momenta in float32 always: (mean - b1 m) / (1 - b1) would magnify the rounding of a shorter format.
            parts = [sub_bucket_of(bucket, past, torch.float32)]
            if rest:
                parts.append(sub_bucket_of(bucket, rest, bucket.flat.dtype))
            for part in parts:
                self.init_operations(None, part)
            append_sub_buckets(bucket, parts)

    def close(self) -> None:
        super().close()
        self.q_adam.detach_averager(self)

    def state_parameters(self) -> list[torch.Tensor]:
        """Return those of the optimizer, whose momenta are sent."""
        return self.q_adam.parameters

    def _append_mean_of_momenta(self, bucket: BaguaBucket) -> None:
        feedback = None
        if self.parameter_state is not None:
            feedback = self.parameter_state.of_bucket(bucket)
            bucket.append_python_op(self.parameter_state.resolve_last_backward)
        bucket.append_python_op(self._form_momenta)
        bucket.append_centralized_synchronous_op(
            hierarchical=self.algorithm.hierarchical,
            compression=self.compressor,
            error_feedback=feedback,
        )
        bucket.append_python_op(self._form_gradients_or_adopt_momenta)

    def _sends_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum travels; in full precision the gradient does, whose mean comes to the same."""
        return self.q_adam.is_past_warmup(parameter) and encodes_momentum(self.compressor, parameter)

    @torch.no_grad()
    def _form_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for gradients, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=share)

    @torch.no_grad()
    def _form_gradients(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for averages, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_gradients(averages, momenta, beta1=beta1, share=share)

    def _form_gradients_or_adopt_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.has_joined:
            self._adopt_momenta(bucket, group)
        else:
            self._form_gradients(bucket, group)

    @torch.no_grad()
    def _adopt_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        """Do what the other ranks' steps do with the mean: this rank takes none, and what it sends must not be old."""
        if self.parameter_state is not None:
            self.parameter_state.commit_without_step(bucket)
        if not bool(bucket.flat.isfinite().all()):  # then they skip it
            return
        self._form_gradients(bucket, group)
        bucket.flat.div_(self.loss_scale)
        for gradients, momenta, beta1, _ in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=1.0 - beta1)
        for tensor, momentum in bucket.views(bucket.flat):
            self.q_adam.adopt_momentum(tensor.parameter, momentum)

    def _with_momenta(
        self, bucket: BaguaBucket
    ) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor], float, float]]:
        """Yield, for each beta1 that parameters have, their parts of the flat tensor, their momenta, beta1 and share.

        The share is (1 - beta1) / loss scale: gradients carry the scale, momenta do not.
        """
        alike: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor, part in bucket.parts(bucket.flat):
            momentum = self.q_adam.state[tensor.parameter]["exp_avg"]
            beta1 = self.q_adam.beta1_of(tensor.parameter)
            alike.setdefault(beta1, []).append((part, tensor.order.flatten(momentum)))
        for beta1, pairs in alike.items():
            parts, momenta = map(list, zip(*pairs, strict=True))
            yield parts, momenta, beta1, (1.0 - beta1) / self.loss_scale


register("qadam", QAdamAlgorithm, "Adam whose momentum is averaged in 8 bits, or in one, after a warm-up")
