"""QAdam: after a warm-up, Adam's momentum travels in 8 bits or in one, and nothing else does."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch

from torchbagua.algorithms.averaged_gradients import with_average
from torchbagua.algorithms.base import Algorithm, check_flags, register
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.q_adam_optimizer import QAdamOptimizer
from torchbagua.algorithms.rank_state import check_rank_state, place_of
from torchbagua.algorithms.residuals import ResidualsByParameter
from torchbagua.algorithms.wrapped_optimizer import unwrap
from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import (
    BaguaProcessGroup,
    ResidualPair,
    TwoPhaseResiduals,
    fingerprint,
    require_same_progress,
)
from torchbagua.compressors import DEFAULT_BLOCK, Compressor, MinMaxUInt8, Sign1Bit, check_block
from torchbagua.memory_order import flatten_like

_COMPRESSORS: dict[str, type[MinMaxUInt8 | Sign1Bit]] = {"MinMaxUInt8": MinMaxUInt8, "sign1bit": Sign1Bit}

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Average gradients in full precision while QAdamOptimizer warms up, and compressed momenta then.

    After the warm-up rank i forms m_i = b1 m + (1 - b1) g_i of its own gradient, and the mean of m_i over the ranks
    travels as ByteGrad's gradients do (1-bit Adam, Tang et al., arXiv 2102.02888; Bagua, arXiv 2107.01499). The
    gradient becomes (mean - b1 m) / (1 - b1), from which the optimizer's step forms the mean again; so GradScaler and
    whatever else stands between backward and step act on a gradient, as everywhere. In 8 bits its norm is that of the
    mean gradient within some per cent. In one bit it is twice that or many times, since all momenta of a block have
    one magnitude: there, clip in the warm-up only. What other optimizers train is averaged in full precision, and so
    are gradients of float64 parameters, from whose mean the step forms the momentum.

    With error feedback every rank adds to its momentum what compression left out of the one before, and the owner of a
    chunk likewise to the mean (1-bit Adam, Algorithm 1). What is left out counts when the optimizer's step has used
    what was sent. Accumulate under `no_sync`, which sends once; of several synchronised backward passes before a step
    it counts once too, for 4 bytes a parameter more, but those of a parameter must all have a gradient for it, and DDP
    must not form its buckets anew between them, as after its first: both raise. Residuals are float32, two of each for
    a step that may be skipped: 8 bytes a parameter, and 8 divided by the number of ranks. They are in `state_dict`,
    other ones on each rank; a new attachment starts from zero, or from that, with the same `error_feedback` and
    `compression`: what one bit leaves out is of another size than what 8 bits do. Under AMP they need the loss scale:
    `attach(..., grad_scaler=scaler)`, or behind the plain hook `impl.grad_scaler = scaler`.

    Under `torch.distributed.algorithms.Join` a rank that has run out of data takes no more steps; its momenta follow
    the others', to the bit where these neither clip gradients nor have a weight decay that is not decoupled, of which
    it knows nothing. Its warm-up stands still, and where theirs ends meanwhile all ranks raise.

    Args:
        q_adam_optimizer: the optimizer that is attached with it.
        hierarchical: where there are several nodes with several ranks, full precision within nodes and compressed
            between.
        block: elements that share a quantisation range, see `ByteGradAlgorithm`, or a scale.
        compression: "MinMaxUInt8", or "sign1bit" with error feedback only: sign and one scale a block.
        error_feedback: add what compression leaves out to what is sent next.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    averages_weights: ClassVar[bool | None] = False

    q_adam_optimizer: QAdamOptimizer = field(repr=False)
    hierarchical: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK
    compression: str = "MinMaxUInt8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_adam_optimizer", unwrap(self.q_adam_optimizer))
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise ValueError(
                f"QAdamAlgorithm: q_adam_optimizer must be a QAdamOptimizer, got {type(self.q_adam_optimizer).__name__}"
            )
        check_flags(self, "hierarchical", "error_feedback")
        check_block("QAdamAlgorithm", self.block)
        if not isinstance(self.compression, str) or self.compression not in _COMPRESSORS:
            raise ValueError(
                f"QAdamAlgorithm: compression must be one of {sorted(_COMPRESSORS)}, got {self.compression!r}"
            )
        if self.compression == "sign1bit" and not self.error_feedback:
            raise ValueError(
                "QAdamAlgorithm: compression 'sign1bit' needs error_feedback=True: one bit leaves so much out that "
                "training fails where it is lost"
            )

    @classmethod
    def for_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer]) -> "QAdamAlgorithm":
        """Return the algorithm of the QAdamOptimizer in `optimizers`. Raises ValueError unless there is one."""
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(own) != 1:
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(f"QAdamAlgorithm: by its name it needs exactly one QAdamOptimizer, got {names}")
        return cls(own[0])

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
        """Return `error_feedback`, and with it `compression`."""
        if not self.error_feedback:
            return {"error_feedback": False}
        return {"error_feedback": True, "compression": self.compression}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError unless the optimizer is one of `optimizers`."""
        if self.q_adam_optimizer not in optimizers:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer must be the optimizer that is attached, got another one")

    def make_impl(self, process_group: BaguaProcessGroup) -> "QAdamAlgorithmImpl":
        """Return the impl over `process_group`. Raises ValueError where another one serves the optimizer."""
        return QAdamAlgorithmImpl(
            process_group,
            self.q_adam_optimizer,
            self.hierarchical,
            block=self.block,
            compression=self.compression,
            error_feedback=self.error_feedback,
        )


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See `QAdamAlgorithm`."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: bool = True,
        *,
        block: int | None = DEFAULT_BLOCK,
        compression: str = "MinMaxUInt8",
        error_feedback: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.optimizer = q_adam_optimizer
        self.hierarchical = hierarchical
        self.compressor: Compressor = _COMPRESSORS[compression](block)
        self.residuals = ResidualsByParameter() if error_feedback else None
        self._num_past_warmup = 0
        self._loss_scale = 1.0
        q_adam_optimizer.serve(self)

    @property
    def needs_grad_scaler(self) -> bool:
        """True: gradients carry the loss scale, and momenta do not."""
        return True

    def need_reset(self) -> bool:
        """Return True where parameters have come to the end of their warm-up since the last backward."""
        # Once a backward: on a GPU it waits for what has been computed so far.
        self._loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        num_updates = self.optimizer.num_updates_past_warmup
        before, self._num_past_warmup = self._num_past_warmup, len(num_updates)
        if self.process_group.size > 1:
            # Each time: what is sent may change its form after the warm-up too, by a state that is loaded, and a rank
            # that has not loaded it does not know.
            facts = {
                "parameters past their warm-up": len(num_updates),
                "updates of parameters past their warm-up": sum(num_updates),
            }
            in_step = self.lane.submit(lambda: require_same_progress(self.process_group.world, facts, "the gradients"))
            if self.process_group.has_nccl:  # its collectives do not wait for their turn in the lane
                in_step.result()
        return before != self._num_past_warmup

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients, or of momenta; where it is of both kinds, of each apart."""
        past = [tensor for tensor in bucket.tensors if self._sends_momentum(tensor.parameter)]
        if not past:
            bucket.append_centralized_synchronous_op(hierarchical=self.hierarchical)
        elif len(past) == len(bucket.tensors) and bucket.flat.dtype == torch.float32:
            self._append_mean_of_momenta(bucket)
        else:
            rest = [tensor for tensor in bucket.tensors if tensor not in past]
            # Momenta in float32 always: (mean - b1 m) / (1 - b1) would magnify the rounding of a shorter format.
            parts = [self._part_of(bucket, past, torch.float32)]
            if rest:
                parts.append(self._part_of(bucket, rest, bucket.flat.dtype))

            def average_parts(whole: BaguaBucket, group: BaguaProcessGroup) -> None:
                _run_parts(whole, parts)

            bucket.append_python_op(average_parts)

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of the optimizer's that travel in full precision, past their warm-up too."""
        own = {id(parameter) for parameter in self.optimizer.parameters}
        return {name: one for name, one in super().uncompressed(parameters).items() if id(one) in own}

    def on_step(self, moved: Collection[torch.Tensor]) -> None:
        """Take what compression left out of these parameters' momenta for their residuals: the optimizer moves them."""
        if self.residuals is not None:
            self.residuals.commit(with_average(moved))

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals that this rank holds, where there is error feedback."""
        if self.residuals is None:
            return {}
        return {**place_of(self.process_group), **self.residuals.state_dict(self._named)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank. With error feedback collective, between two steps.

        Raises:
            ValueError: it is not the state of this algorithm, or that of another rank.
            CommunicationError: other ranks hold residuals of other parameters, or did not load theirs in time.
        """
        if self.residuals is None:
            super().load_state_dict(state)
            return
        owner = type(self).__name__
        check_rank_state(owner, state, ResidualPair._fields, self.process_group)
        self.residuals.load_state_dict(owner, state, self._named)
        # What ranks hold decides whether they sum it in the next backward.
        facts = {"as a digest of the names in its state": fingerprint(list(state["sent"]))}
        self.lane.submit(
            lambda: require_same_progress(self.process_group.world, facts, "loading the residuals")
        ).result()
        self.reset()

    def close(self) -> None:
        """End the lane, and let go of the optimizer and its parameters."""
        super().close()
        self.optimizer.release(self)
        if self.residuals is not None:
            self.residuals.close()

    def _append_mean_of_momenta(self, bucket: BaguaBucket) -> None:
        feedback = None
        if self.residuals is not None and self.process_group.size > 1:  # one rank sends nothing, and leaves nothing out
            feedback = self.residuals.of_bucket(bucket)
            bucket.append_python_op(self._continue_residuals)
        bucket.append_python_op(self._form_momenta)
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            scattergather=True,
            compression=self.compressor,
            error_feedback=feedback,
        )

        def use_mean(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            if self.has_joined:
                self._follow(bucket, group, feedback)
            else:
                self._form_gradients(bucket, group)

        bucket.append_python_op(use_mean)

    def _part_of(self, bucket: BaguaBucket, tensors: list[BaguaTensor], dtype: torch.dtype) -> BaguaBucket:
        flat = bucket.flat.new_zeros(sum(tensor.parameter.numel() for tensor in tensors), dtype=dtype)
        part = BaguaBucket(bucket.name, tensors, bucket.group, flat)
        self.init_operations(None, part)
        return part

    def _sends_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum travels; in full precision the gradient does, whose mean comes to the same."""
        return self.optimizer.is_past_warmup(parameter) and self.compressor.encodes(parameter.dtype)

    @property
    def _named(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters, by their names in the module; by their places behind the plain hook."""
        named = {self._names.get(id(p), f"parameter {index}"): p for index, p in enumerate(self.optimizer.parameters)}
        return {name: p for name, p in named.items() if self.compressor.encodes(p.dtype)}

    def _continue_residuals(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        assert self.residuals is not None
        self.residuals.before_sending(bucket)

    @torch.no_grad()
    def _form_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for gradients, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=share)

    @torch.no_grad()
    def _form_gradients(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for averages, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_gradients(averages, momenta, beta1=beta1, share=share)

    @torch.no_grad()
    def _follow(self, bucket: BaguaBucket, group: BaguaProcessGroup, feedback: TwoPhaseResiduals | None) -> None:
        """Do what the other ranks' steps do with the mean: this rank takes none, and what it sends must not be old."""
        if self.residuals is not None:
            self.residuals.end_accumulation(bucket)
        if not bool(bucket.flat.isfinite().all()):  # then they skip it
            return
        self._form_gradients(bucket, group)
        bucket.flat.div_(self._loss_scale)
        for gradients, momenta, beta1, _ in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=1.0 - beta1)
        for tensor, momentum in bucket.views(bucket.flat):
            self.optimizer.follow(tensor.parameter, momentum)
        if feedback is not None:
            feedback.commit()

    def _with_momenta(
        self, bucket: BaguaBucket
    ) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor], float, float]]:
        """Yield, for each beta1 that parameters have, their parts of the flat tensor, their momenta, beta1 and share.

        The share is (1 - beta1) / loss scale: gradients carry the scale, momenta do not.
        """
        alike: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor, part in bucket.parts(bucket.flat):
            momentum = self.optimizer.state[tensor.parameter]["exp_avg"]
            beta1 = self.optimizer.beta1_of(tensor.parameter)
            alike.setdefault(beta1, []).append((part, flatten_like(tensor.parameter, momentum)))
        for beta1, pairs in alike.items():
            parts, momenta = map(list, zip(*pairs, strict=True))
            yield parts, momenta, beta1, (1.0 - beta1) / self._loss_scale


def _run_parts(whole: BaguaBucket, parts: Sequence[BaguaBucket]) -> None:
    values = {id(tensor): values for tensor, values in whole.parts(whole.flat)}
    for part in parts:
        for tensor, place in part.parts(part.flat):
            place.copy_(values[id(tensor)])
        part.run()
        for tensor, place in part.parts(part.flat):
            values[id(tensor)].copy_(place)


register("qadam", QAdamAlgorithm, "Adam whose momentum is averaged in 8 bits, or in one, after a warm-up")
