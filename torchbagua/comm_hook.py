"""The DDP communication hook that runs a gradient algorithm."""

import torch
import torch.distributed as dist

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.bucket import check_elements


def comm_hook(state: AlgorithmImpl, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket; for `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`.

    Returns at once, so that backward goes on while the impl's lane communicates. The bucket's buffer is changed in
    place.

    Args:
        state: a gradient algorithm's impl.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. Where communication fails, backward raises a RuntimeError that names operation,
        bucket and peer.

    Raises:
        TypeError: `state` is not the impl of a gradient algorithm.
        RuntimeError: `state` is closed.
        ValueError: the gradients are not real floating-point numbers, sparse, or not on the CPU.
    """
    if not isinstance(state, AlgorithmImpl) or state.owns_buckets:
        raise TypeError(
            f"comm_hook: state must be what a gradient algorithm's reify returned, got {type(state).__name__}"
        )
    flat = bucket.buffer()
    check_elements("comm_hook: a bucket's gradients", flat)
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        raise ValueError("comm_hook: parameters must be real, got complex ones, whose gradients DDP flattens as real")
    own_bucket = state.gradient_bucket(bucket.parameters(), flat, index=bucket.index())
    return state.lane.submit(own_bucket.run)
