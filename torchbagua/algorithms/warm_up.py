"""Averaged gradients for a weight algorithm's first steps, with DDP silent or without DDP."""

from collections.abc import Callable, Sequence

from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import Communicator, maximum


def average_gradients(
    buckets: Sequence[BaguaBucket],
    communicator: Communicator,
    run_on_lane: Callable[[Callable[[], list[int]]], list[int]],
) -> None:
    """Replace the gradients of the buckets' parameters by what the buckets' operations make of them.

    A parameter without gradient counts as one whose gradient is zero, unless it has none on any rank: then it stays so,
    as under DDP. Called again after another backward, it averages what has been added since.

    Args:
        buckets: of parameters, whose operations form the mean; their flat tensors are overwritten.
        communicator: of the ranks.
        run_on_lane: runs a function on the lane when all ranks have come here, and returns what it returns.
    """
    members = [member for bucket in buckets for member in bucket.views(bucket.flat)]
    for tensor, part in members:
        gradient = tensor.parameter.grad
        part.zero_() if gradient is None else part.copy_(gradient)
    has_gradient = [int(tensor.parameter.grad is not None) for tensor, _ in members]

    def average() -> list[int]:
        used = maximum(communicator, has_gradient, "the gradients")
        for bucket in buckets:
            bucket.run()
        return used

    for (tensor, part), is_used in zip(members, run_on_lane(average), strict=True):
        if not is_used:
            continue
        if tensor.parameter.grad is None:
            tensor.parameter.grad = part.clone()
        else:
            tensor.parameter.grad.copy_(part)
