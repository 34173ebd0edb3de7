"""What the impls share that keep of gradients, from step to step, what was not sent."""

from collections.abc import Callable

import torch

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.sub_buckets import append_sub_buckets, sub_bucket_of


class FeedbackImpl(AlgorithmImpl):
    """An impl whose `parameter_state`, if it has one, is float32 and without the loss scale."""

    @property
    def needs_grad_scaler(self) -> bool:
        """True with such a state: gradients carry the loss scale, which changes, and what is kept does not."""
        return self.parameter_state is not None

    def append_with_state(self, bucket: BaguaBucket, append: Callable[[BaguaBucket], object]) -> None:
        """Have `append` append to a bucket what works with its state, and what has to come before and after that."""
        assert self.parameter_state is not None
        if bucket.flat.dtype != torch.float32:  # a shorter format would round what is added to it
            part = sub_bucket_of(bucket, bucket.tensors, torch.float32)
            self.append_with_state(part, append)
            append_sub_buckets(bucket, [part])
            return
        bucket.append_python_op(self.parameter_state.resolve_last_backward)
        bucket.append_python_op(self._unscale)
        append(bucket)
        bucket.append_python_op(self._commit_if_joined)
        bucket.append_python_op(self._restore_scale)

    def _unscale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.loss_scale != 1.0:
            bucket.flat.div_(self.loss_scale)

    def _commit_if_joined(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.has_joined and self.parameter_state is not None:
            self.parameter_state.commit_without_step(bucket)

    def _restore_scale(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self.loss_scale != 1.0:
            bucket.flat.mul_(self.loss_scale)
