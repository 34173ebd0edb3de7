"""Averaged gradients for a weight algorithm's first steps, with DDP silent or without DDP."""

from collections.abc import Callable, Sequence

from torchbagua.collectives import Communicator, all_reduce_max
from torchbagua.weights import WeightBucket


def average_gradients(
    buckets: Sequence[WeightBucket],
    communicator: Communicator,
    run_on_lane: Callable[[Callable[[], list[int]]], list[int]],
) -> None:
    """Replace the gradients of the buckets' parameters by what the buckets' operations make of them.

    A parameter without gradient counts as one whose gradient is zero, unless it has none on any rank: then it stays so,
    as under DDP. Called again after another backward, it averages what has been added since.

    Args:
        buckets: of parameters. Their operations make of the snapshot the flat tensor, its mean; both are overwritten.
        communicator: of the ranks.
        run_on_lane: runs a function on the lane when all ranks have come here, and returns what it returns.
    """
    has_gradient = []
    for tensor, part in (member for one in buckets for member in one.bucket.views(one.snapshot)):
        gradient = tensor.parameter.grad
        part.zero_() if gradient is None else part.copy_(gradient)
        has_gradient.append(int(gradient is not None))

    def average() -> list[int]:
        used = all_reduce_max(communicator, has_gradient, "the gradients")
        for one in buckets:
            one.bucket.run()
        return used

    all_used = run_on_lane(average)
    means = [member for one in buckets for member in one.bucket.views(one.bucket.flat)]
    for (tensor, part), is_used in zip(means, all_used, strict=True):
        if not is_used:
            continue
        if tensor.parameter.grad is None:
            tensor.parameter.grad = part.clone()
        else:
            tensor.parameter.grad.copy_(part)
