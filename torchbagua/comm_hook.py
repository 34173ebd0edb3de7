"""The DDP communication hook that runs a gradient algorithm."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.bucket import BaguaBucket, check_elements
from torchbagua.clocks import Timestamp
from torchbagua.torch_private import queue_callback
from torchbagua.tracer import Tracer


def comm_hook(state: AlgorithmImpl, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket; for `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`.

    Returns at once (over NCCL QAdam first compares how far the ranks have come), so that backward goes on while the
    impl's lane communicates. The bucket's buffer is changed in place. Of a group that has NCCL, gradients on a GPU stay
    there: all is launched at once, on one stream beside backward's. With gloo the bytes that are sent pass through the
    host's memory.

    Under `torch.distributed.algorithms.Join` a rank that has run out of data goes on to take part with zeros, and the
    mean is that of all ranks of the group, whatever `divide_by_initial_world_size` says: DDP leaves the division to its
    hook, torch's own hooks divide so too, and nobody tells a hook how many ranks still have data.

    Args:
        state: a gradient algorithm's impl.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. Where communication fails, backward raises a CommunicationError that names
        operation, bucket, rank and peer.

    Raises:
        TypeError: `state` is not the impl of a gradient algorithm.
        RuntimeError: `state` is closed, or a CUDA graph is being captured; or it keeps state by parameter, and nobody
            has told it of steps by the second backward (`reify`'s `optimizer`, or `AlgorithmImpl.step_taken`).
        ValueError: the gradients are of another dtype than float64, float32, bfloat16, float16 or their complex ones,
            sparse, or neither on the CPU nor on a GPU.
    """
    if not isinstance(state, AlgorithmImpl) or state.owns_buckets:
        raise TypeError(
            f"comm_hook: state must be what a gradient algorithm's reify returned, got {type(state).__name__}"
        )
    flat = bucket.buffer()
    check_elements("comm_hook: a bucket's gradients", flat)
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "comm_hook: a CUDA graph is being captured; capture parts of the model alone "
            "(torch.cuda.make_graphed_callables), without DDP's communication"
        )
    if bucket.index() == 0:
        # Under Join DDP calls its hook on a rank that has run out of data too, outside of a backward.
        state.has_joined = not _queue(lambda: None)
    own_bucket = state.gradient_bucket(bucket.parameters(), flat, index=bucket.index())
    run = own_bucket.run
    if bucket.is_last() and state.tracer.is_on:
        run = _ending_step(own_bucket, state.tracer) if state.has_joined else _report_wait(own_bucket, state.tracer)
    # On this thread too, since the profiler does not follow the lane's unless it is told to.
    with state.tracer.range(own_bucket.name):
        state.use_device(flat.device)
        if flat.is_cuda and state.process_group.has_nccl:
            return state.lane.launch(run)
        future = state.lane.submit(run).future()
    if bucket.is_last() and state.has_joined:
        future.wait()  # DDP waits for it now, but hears of no error there
    return future


def _queue(callback: Callable[[], None]) -> bool:
    """Have `callback` called when all gradients are computed; return False, and do nothing, outside of a backward."""
    try:
        queue_callback(callback)
    except RuntimeError:
        return False
    return True


def _ending_step(last: BaguaBucket, tracer: Tracer) -> Callable[[], torch.Tensor]:
    """Return what runs the last bucket where neither backward nor optimizer tells that a step ends."""

    def run() -> torch.Tensor:
        flat = last.run()
        tracer.end_step()
        return flat

    return run


def _report_wait(last: BaguaBucket, tracer: Tracer) -> Callable[[], torch.Tensor]:
    """Return what runs the last bucket of a backward, and tell observers how long backward waits for it."""
    begun: Timestamp = 0
    done: Timestamp = 0

    def run() -> torch.Tensor:
        nonlocal done
        flat = last.run()
        done = tracer.now()
        return flat

    def begin() -> None:
        nonlocal begun
        begun = tracer.now()
        _queue(end)

    def end() -> None:
        # Not until now: after its wait DDP copies the averages into the gradients, with communication or without.
        tracer.tell("wait", begun, done)
        if not tracer.has_optimizer:
            tracer.end_step()

    # Called when all gradients are computed. DDP waits in a callback that it queues when this hook has returned, so
    # what this one queues is called after that.
    _queue(begin)
    return run
