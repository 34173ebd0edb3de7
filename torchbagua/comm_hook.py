"""The DDP communication hook that runs a gradient algorithm."""

import torch
import torch.distributed as dist

from torchbagua.algorithms.base import AlgorithmImpl


def comm_hook(state: AlgorithmImpl, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket; for `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`.

    Returns at once, so that backward goes on while the impl's lane communicates. The bucket's buffer is changed in
    place.

    Args:
        state: a gradient algorithm's impl.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. Where communication fails, waiting for it raises RuntimeError in backward, which
        names operation, bucket and peer.

    Raises:
        TypeError: `state` is not the impl of a gradient algorithm.
        ValueError: the gradients are not real floating-point numbers, sparse, or not on the CPU.
    """
    if not isinstance(state, AlgorithmImpl) or state.owns_buckets:
        raise TypeError(
            f"comm_hook: state must be what a gradient algorithm's reify returned, got {type(state).__name__}"
        )
    flat = bucket.buffer()
    if flat.is_sparse or not flat.is_floating_point():
        kind = "sparse" if flat.is_sparse else str(flat.dtype)
        raise ValueError(f"comm_hook: gradients must be dense float32, bfloat16 or float16, got {kind} in a bucket")
    if flat.device.type != "cpu":
        raise ValueError(f"comm_hook: gradients must be on the CPU in this release, got a bucket on {flat.device}")
    own_bucket = state.gradient_bucket(bucket.parameters(), flat, index=bucket.index())
    return state.lane.submit(own_bucket.run)
