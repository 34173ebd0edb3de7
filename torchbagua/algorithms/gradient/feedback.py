"""Error feedback: the residual of each gradient is stored between steps."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

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
