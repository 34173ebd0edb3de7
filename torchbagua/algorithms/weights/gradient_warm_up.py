"""Averaged gradients for the asynchronous algorithm's first steps, with DDP silent or without DDP."""

import torch

from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.shards import local_shard
from torchbagua.runtime.weight_buckets import WeightBuckets


class GradientWarmUp:
    """Averages the gradients of weights, by the operations and the flat tensors of their buckets.

    These make of the snapshot the flat tensor, its mean. Here the snapshot holds gradients and the flat tensor their
    means; no round has begun that would need them otherwise.

    Args:
        weights: whose gradients.
        group: the ranks.
    """

    def __init__(self, weights: WeightBuckets, group: BaguaProcessGroup) -> None:
        self._weights = weights
        self._world = group.world
        self._has_averaged = False  # since the last step

    def average_gradients(self) -> None:
        """Replace the gradients of parameters by their means, after a backward.

        A parameter without gradient counts as one whose gradient is zero, unless it has none on any rank: then it stays
        so, as under DDP. Called again after another backward, it averages what has been added since.
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

        all_used = self._weights.lockstep.submit(average, "the gradients").result()
        means = [member for bucket in buckets for member in bucket.views(bucket.flat)]
        for (tensor, part), is_used in zip(means, all_used, strict=True):
            if not is_used:
                continue
            if tensor.parameter.grad is None:
                tensor.parameter.grad = torch.zeros_like(tensor.parameter)
            local_shard(tensor.parameter.grad).copy_(part)
        self._has_averaged = True

    def after_step(self) -> None:
        """Take note of a step of the warm-up.

        Raises:
            RuntimeError: no gradients were averaged since the last one.
        """
        if not self._has_averaged:
            raise RuntimeError(
                "torchbagua: a step of the warm-up without averaged gradients: no backward pass came from what the "
                "attached module returned; set warmup_steps=0 where backward runs within that module's forward, as "
                "with Lightning's manual optimization"
            )
        self._has_averaged = False
