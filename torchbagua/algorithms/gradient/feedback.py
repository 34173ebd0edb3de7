"""Error feedback: the residual of each gradient is stored between steps, and the optimizers that suit such gradients.

A residual delays most of a gradient, so an optimizer that averages gradients over steps may train badly with it. Its
warnings and errors are below; the measurements are in the documentation.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.sub_buckets import append_sub_buckets, sub_bucket_of

S = TypeVar("S", bound=ParameterState[Any])


class ErrorFeedback(Generic[S]):
    """Makes an impl store a state per parameter, in float32 and without the loss scale.

    Args:
        runner: the impl's runner.
        state: the stored state, such as residuals.

    Attributes:
        state: the same object.
    """

    def __init__(self, runner: GradientRunner, state: S) -> None:
        self.state = runner.keep(state)
        self._runner = runner
        runner.require_grad_scaler()  # gradients contain the loss scale, which changes; the stored state does not

    def append(self, bucket: BaguaBucket, append_operations: Callable[[BaguaBucket], object]) -> None:
        """Call `append_operations(bucket)` and wrap the appended operations in unscale, commit and rescale operations.

        `append_operations` gets a float32 bucket, which is a copy if `bucket` has another dtype.
        """
        if bucket.flat.dtype != torch.float32:  # a shorter format would round the added residual
            part = sub_bucket_of(bucket, bucket.tensors, torch.float32)
            self.append(part, append_operations)
            append_sub_buckets(bucket, [part])
            return
        bucket.append_local_op(self.state.resolve_last_backward)
        bucket.append_local_op(self._unscale)
        append_operations(bucket)
        bucket.append_local_op(self._commit_if_joined)
        bucket.append_local_op(self._restore_scale)

    def _unscale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self._runner.loss_scale != 1.0:
            bucket.flat.div_(self._runner.loss_scale)

    def _commit_if_joined(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self._runner.has_joined:
            self.state.commit_without_step(bucket)

    def _restore_scale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self._runner.loss_scale != 1.0:
            bucket.flat.mul_(self._runner.loss_scale)


def adam_among(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the class name of the first Adam variant (Adam, AdamW, FusedAdam, Adam8bit, ...), or None."""
    # By name, because variants in other packages do not derive from torch's Adam.
    adams = [optimizer for optimizer in optimizers if any("Adam" in cls.__name__ for cls in type(optimizer).__mro__)]
    return type(adams[0]).__name__ if adams else None


def warn_of_sparse_means(algorithm: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn about an Adam, or else a momentum, that steps on the sparse mean of `algorithm`, with error feedback."""
    if adam := adam_among([optimizer for optimizer in optimizers if not _steps_along_signs(optimizer)]):
        warn_user(
            f"torchbagua: {algorithm} with {adam} trains badly: {adam} averages over steps, and in each step most "
            "gradient elements are zero. Use torch.optim.AdamW with betas=(0.0, 0.0), which steps along the signs of "
            "the sent elements, a learning rate 3 to 20 times as large, larger for a smaller ratio, and a weight decay "
            "that is as many times smaller. Or use CompressedAllReduceAlgorithm() with 4 bits or QAdamAlgorithm with "
            "one bit, or train with SGD"
        )
        return
    for optimizer in optimizers:
        momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
        if momenta:
            instead = f" or use TopKAlgorithm(momentum={momenta[0]}, warmup_steps=...)"
            warn_user(
                f"torchbagua: {algorithm} with the momentum {momenta[0]} of {type(optimizer).__name__} may diverge: "
                "the momentum treats delayed gradients as new. Set that momentum to 0, and increase the learning rate"
                f"{instead if isinstance(optimizer, torch.optim.SGD) else ''}"
            )
            return


def check_betas(owner: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError, prefixed with `owner`, if only the first beta of an Adam is not 0, as a scheduler can set it.

    The mean of the gradients is then divided by the magnitude of the last one, which is 0 for most elements.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            betas = group.get("betas")
            if betas is not None and len(betas) == 2 and betas[0] and not betas[1]:
                raise ValueError(
                    f"{owner}: the first of {type(optimizer).__name__}'s betas must be 0 if the second is, got "
                    f"{betas}; if a scheduler such as OneCycleLR sets it, pass cycle_momentum=False to the scheduler"
                )


def _steps_along_signs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is an AdamW with betas of 0, which divides a gradient by its own magnitude.

    Adam adds its weight decay to the gradient, and so would move elements that were not sent by a whole step.
    """
    is_adamw = any("AdamW" in cls.__name__ for cls in type(optimizer).__mro__)
    return is_adamw and not any(any(group.get("betas", (1,))) for group in optimizer.param_groups)
