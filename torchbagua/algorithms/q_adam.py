"""QAdam: after a warm-up, Adam's momentum travels in 8 bits, and nothing else does."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm, AlgorithmImpl, check_flags, register
from torchbagua.algorithms.q_adam_optimizer import QAdamOptimizer
from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.compressors import DEFAULT_BLOCK, MinMaxUInt8, check_block

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Average gradients in full precision while QAdamOptimizer warms up, and momenta in 8 bits then.

    After the warm-up rank i forms m_i = b1 m + (1 - b1) g_i of its own gradient, and the mean of m_i over the ranks
    travels as ByteGrad's gradients do (1-bit Adam, Tang et al., arXiv 2102.02888; Bagua, arXiv 2107.01499). The
    gradient becomes (mean - b1 m) / (1 - b1), from which the optimizer's step forms the mean again; so clipping,
    GradScaler and whatever else stands between backward and step act on a gradient, as everywhere. What other
    optimizers train is averaged in full precision.

    Args:
        q_adam_optimizer: the optimizer that is attached with it.
        hierarchical: where there are several nodes with several ranks, full precision within nodes and 8 bits between.
        block: elements that share a quantisation range, see `ByteGradAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    q_adam_optimizer: QAdamOptimizer = field(repr=False)
    hierarchical: bool = True
    _: KW_ONLY
    block: int | None = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise ValueError(
                f"QAdamAlgorithm: q_adam_optimizer must be a QAdamOptimizer, got {type(self.q_adam_optimizer).__name__}"
            )
        check_flags(self, "hierarchical")
        check_block("QAdamAlgorithm", self.block)

    def arguments(self) -> dict[str, str]:
        """Return the arguments, and what of the optimizer must be the same on all ranks."""
        options = ("warmup_steps", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
        groups = [[group[option] for option in options] for group in self.q_adam_optimizer.param_groups]
        return {**super().arguments(), f"q_adam_optimizer ({', '.join(options)} of its groups)": repr(groups)}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError unless the optimizer is one of `optimizers`."""
        if self.q_adam_optimizer not in optimizers:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer must be the optimizer that is attached, got another one")

    def make_impl(self, process_group: BaguaProcessGroup) -> "QAdamAlgorithmImpl":
        """Return the impl over `process_group`. Raises ValueError where another one serves the optimizer."""
        return QAdamAlgorithmImpl(process_group, self.q_adam_optimizer, self.hierarchical, block=self.block)


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See `QAdamAlgorithm`."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: bool = True,
        *,
        block: int | None = DEFAULT_BLOCK,
    ) -> None:
        super().__init__(process_group)
        self.optimizer = q_adam_optimizer
        self.hierarchical = hierarchical
        self.compressor = MinMaxUInt8(block)
        self._num_past_warmup = 0
        q_adam_optimizer.serve(self)

    def need_reset(self) -> bool:
        """Return True where parameters have come to the end of their warm-up since the last backward."""
        before, self._num_past_warmup = self._num_past_warmup, self.optimizer.num_past_warmup
        return before != self._num_past_warmup

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients, or of momenta, or of both kinds apart."""
        past = [tensor for tensor in bucket.tensors if self.optimizer.is_past_warmup(tensor.parameter)]
        if not past:
            bucket.append_centralized_synchronous_op(hierarchical=self.hierarchical)
        elif len(past) == len(bucket.tensors):
            bucket.append_python_op(self._form_momenta)
            bucket.append_centralized_synchronous_op(
                hierarchical=self.hierarchical, scattergather=True, compression=self.compressor
            )
            bucket.append_python_op(self._form_gradients)
        else:
            rest = [tensor for tensor in bucket.tensors if tensor not in past]
            parts = [self._part_of(bucket, some) for some in (past, rest)]
            bucket.append_python_op(lambda whole, _: _run_parts(whole, parts))

    def close(self) -> None:
        """End the lane, and let go of the optimizer."""
        super().close()
        self.optimizer.release(self)

    def _part_of(self, bucket: BaguaBucket, tensors: list[BaguaTensor]) -> BaguaBucket:
        flat = bucket.flat.new_zeros(sum(tensor.parameter.numel() for tensor in tensors))
        part = BaguaBucket(bucket.name, tensors, bucket.group, flat)
        self.init_operations(None, part)
        return part

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    @torch.no_grad()
    def _form_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for part, history, beta1 in self._with_histories(bucket):
            part.mul_(1.0 - beta1).add_(history)

    @torch.no_grad()
    def _form_gradients(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for part, history, beta1 in self._with_histories(bucket):
            # By a tensor: on CUDA, division by a Python number is a multiplication by its reciprocal.
            part.sub_(history).div_(torch.full((1,), 1.0 - beta1, dtype=part.dtype, device=part.device))

    def _with_histories(self, bucket: BaguaBucket) -> Any:
        """Yield of each parameter its part of the flat tensor, b1 m in the unit of its gradient, and b1."""
        scale = self._loss_scale
        for tensor, part in bucket.views(bucket.flat):
            beta1 = self.optimizer.beta1_of(tensor.parameter)
            momentum = self.optimizer.state[tensor.parameter]["exp_avg"]
            yield part, (momentum * beta1).mul_(scale), beta1


def _run_parts(whole: BaguaBucket, parts: Sequence[BaguaBucket]) -> None:
    values = {id(tensor): values for tensor, values in whole.views(whole.flat)}
    for part in parts:
        for tensor, place in part.views(part.flat):
            place.copy_(values[id(tensor)])
        part.run()
        for tensor, place in part.views(part.flat):
            values[id(tensor)].copy_(place)


register("qadam", QAdamAlgorithm, "Adam whose momentum is averaged in 8 bits after a warm-up")
