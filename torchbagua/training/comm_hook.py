"""The DDP communication hook that runs a gradient algorithm.

`attach` has DDP call it. *The standalone hook* is the same hook, registered by the user with `ddp.register_comm_hook`
instead of `attach`. The runner then knows neither the module nor the parameters' names, and knows an optimizer only if
`reify` was given one.
"""

import torch
import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._torch import current_backward, queue_callback
from torchbagua.runtime.bucket import BaguaBucket, check_elements
from torchbagua.runtime.meeting import Meeting, OpeningBucket
from torchbagua.runtime.runner import Runner
from torchbagua.training.wait_timer import WaitTimer


def comm_hook(state: Runner, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket: a DDP communication hook, for a loop without `attach`.

    Register it with `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`. DDP then calls it.

    The hook returns at once, so backward overlaps with the communication of the bucket. It blocks in three cases:

    - In stream order, QAdam first waits until ranks have compared their progress, which they begin to do at the
      end of a step.
    - With a GradScaler, QAdam and error feedback first read the loss scale. If `attach` was given the scaler, the GPU
      copied the scale before the forward.
    - If a stage of a warm-up may begin, ranks first agree on the number of steps.

    The bucket's buffer is changed in place. If the backend works in stream order, as GPU backends do, gradients on a
    GPU stay there, and all work is launched on one stream alongside backward's stream. Otherwise the bytes to send are
    copied through host memory.

    With `torch.distributed.algorithms.Join`, a rank that has run out of data contributes zeros. The mean is always over
    all ranks of the group, whatever the value of `divide_by_initial_world_size`: DDP leaves the division to its hook
    and does not tell it how many ranks still have data. Torch's own hooks divide in the same way.

    Args:
        state: the Runner that `Algorithm.reify` of a gradient algorithm returned.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. If communication fails, backward raises a CommunicationError that names
            operation, bucket, rank and peer.

    Raises:
        TypeError: `state` is not the Runner of a gradient algorithm. Or `bucket` is not a GradBucket, since the module
            was created with `torch._dynamo.config.optimize_ddp = "python_reducer"`.
        RuntimeError: `state` is closed, or a CUDA graph is being captured. Or the algorithm needs to know which steps
            were taken, and was not notified of any by the second backward: give `reify` the optimizer, or call
            `Runner.step_taken`.
        ValueError: gradients are sparse, neither on the CPU nor on a GPU, or of a dtype other than float64, float32,
            bfloat16, float16, complex128 and complex64.
    """
    if not isinstance(state, Runner) or state.averages_weights:
        got = f"that of {state.name}, which averages weights" if isinstance(state, Runner) else type(state).__name__
        raise TypeError(f"comm_hook: state must be what a gradient algorithm's reify returned, got {got}")
    if isinstance(bucket, tuple):  # (gradient, parameter); DDP then discards the hook's result
        raise TypeError(
            "comm_hook: bucket must be a torch.distributed.GradBucket, got a tuple of gradient and parameter: the "
            'module was created with torch._dynamo.config.optimize_ddp = "python_reducer", with which DDP builds no '
            "buckets; wrap the model with another value of it"
        )
    flat = bucket.buffer()
    check_elements("comm_hook: a bucket's gradients", flat)
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "comm_hook: a CUDA graph is being captured; capture parts of the model "
            "(torch.cuda.make_graphed_callables) without DDP's communication"
        )
    meeting: Meeting | None = None
    if bucket.index() == 0:
        # With Join, DDP also calls its hook on a rank that has run out of data, outside of a backward.
        backward = current_backward()
        state.begin_backward(has_joined=backward < 0, backward=backward)
        meeting = state.take_meeting()
    gradient_bucket = state.gradient_bucket(bucket.parameters(), flat, index=bucket.index())
    work: BaguaBucket | WaitTimer = gradient_bucket
    if bucket.is_last() and state.tracer.is_on:
        work = WaitTimer(
            gradient_bucket,
            state.tracer,
            is_in_backward=not state.has_joined,
            ends_step=state.is_end_of_joined_step,
        )
    # On this thread too, since the profiler records the lane's thread only if it is configured to.
    with state.tracer.range(gradient_bucket.name):
        state.use_device(flat.device)
        if state.process_group.world.in_stream_order(flat.device):
            if meeting is not None:
                state.lane.submit(meeting.run)  # on the host; an error raises at the next bucket
            launched = state.lane.launch(work.run)
            if bucket.is_last() and state.has_joined:
                state.end_joined_backward()
            return launched
        job = state.lane.submit_steps(work if meeting is None else OpeningBucket(meeting, work, gradient_bucket.name))
    future = job.future()
    if bucket.is_last() and not state.has_joined and flat.is_cpu:
        queue_callback(job.wait)  # before DDP's callback, whose wait would delay signal handlers
    if bucket.is_last() and state.has_joined:
        _concurrency.wait_for(future)  # DDP waits for it now, but ignores its error
    return future
