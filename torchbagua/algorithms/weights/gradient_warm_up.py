"""Averaged gradients for the asynchronous algorithm's first steps, with DDP silent or without DDP."""

from collections.abc import Callable, Sequence

import torch

from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.runtime.lane import Job
from torchbagua.runtime.shards import local_shard
from torchbagua.runtime.weight_buckets import WeightBucket
from torchbagua.transport.communicator import Communicator


def average_gradients(
    buckets: Sequence[WeightBucket],
    communicator: Communicator,
    submit_in_lockstep: Callable[[Callable[[], list[int]], str], Job[list[int]]],
) -> None:
    """Replace the gradients of the buckets' parameters by what the buckets' operations make of them.

    A parameter without gradient counts as one whose gradient is zero, unless it has none on any rank: then it stays so,
    as under DDP. Called again after another backward, it averages what has been added since.

    Args:
        buckets: of parameters. Their operations make of the snapshot the flat tensor, its mean. Here the snapshot holds
            gradients and the flat tensor their means; no round has begun that would need them otherwise.
        communicator: of the ranks.
        submit_in_lockstep: has the lane run a function when all ranks have come here, see `AveragingImpl`.
    """
    has_gradient = []
    for tensor, part in (member for one in buckets for member in one.bucket.views(one.snapshot)):
        gradient = tensor.parameter.grad
        part.zero_() if gradient is None else part.copy_(local_shard(gradient))
        has_gradient.append(int(gradient is not None))

    def average() -> list[int]:
        used = all_reduce_max(communicator, has_gradient, "the gradients")
        for one in buckets:
            one.bucket.run()
        return used

    all_used = submit_in_lockstep(average, "the gradients").result()
    means = [member for one in buckets for member in one.bucket.views(one.bucket.flat)]
    for (tensor, part), is_used in zip(means, all_used, strict=True):
        if not is_used:
            continue
        if tensor.parameter.grad is None:
            tensor.parameter.grad = torch.zeros_like(tensor.parameter)
        local_shard(tensor.parameter.grad).copy_(part)
