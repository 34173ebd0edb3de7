"""Gradient averaging for the asynchronous algorithm's warm-up, with a DDP that sends nothing or without DDP."""

import torch

from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.weight_buckets import WeightBuckets


class GradientWarmUp:
    """Averages the gradients of weights with the operations and the tensors of the weights' buckets.

    The operations write the mean of the snapshots to the flat tensor. During the warm-up, the snapshot contains
    gradients and the flat tensor contains their means. No round has begun, so the tensors are not in use.

    Args:
        weights: the weights to average gradients of.
        group: the ranks.
    """

    def __init__(self, weights: WeightBuckets, group: BaguaProcessGroup) -> None:
        self._weights = weights
        self._world = group.world
        self._has_averaged = False  # since the last step

    def average_gradients(self) -> None:
        """Replace the gradients of parameters with their means, after a backward.

        A missing gradient counts as zero. If a parameter has no gradient on any rank, its gradient stays None, as with
        DDP. When called again after another backward, this averages the gradients accumulated since.
        """
        buckets, world = [bucket for bucket in self._weights if not bucket.are_buffers], self._world
        has_gradient = []
        for tensor, part in (member for bucket in buckets for member in bucket.views(bucket.snapshot)):
            gradient = tensor.parameter.grad
            part.zero_() if gradient is None else part.copy_(local_shard(gradient))
            has_gradient.append(int(gradient is not None))

        def average() -> list[int]:
            used = all_reduce_max(world, has_gradient, "the gradients")
            for bucket in buckets:
                bucket.run()
            return used

        all_used = self._weights.lockstep.submit(average, "the gradients").finish()
        means = [member for bucket in buckets for member in bucket.views(bucket.flat)]
        for (tensor, part), is_used in zip(means, all_used, strict=True):
            if not is_used:
                continue
            if tensor.parameter.grad is None:
                tensor.parameter.grad = torch.zeros_like(tensor.parameter)
            local_shard(tensor.parameter.grad).copy_(part)
        self._has_averaged = True

    def after_step(self) -> None:
        """Record a step of the warm-up.

        Raises:
            RuntimeError: no gradients were averaged since the last step.
        """
        if not self._has_averaged:
            raise RuntimeError(
                "torchbagua: a warm-up step without averaged gradients: no backward pass started from an output of the "
                "attached module; set warmup_steps=0 if backward runs within that module's forward, as with "
                "Lightning's manual optimization"
            )
        self._has_averaged = False
