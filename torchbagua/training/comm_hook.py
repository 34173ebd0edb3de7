"""The DDP communication hook that runs a gradient algorithm.

`attach` has DDP call it. *The standalone hook* is this one as a user registers it with `ddp.register_comm_hook`,
without `attach`: the runner then knows no module, no names of parameters and no optimizer, unless `reify` was given
one.
"""

import torch
import torch.distributed as dist

from torchbagua._torch import is_in_backward
from torchbagua.runtime.bucket import BaguaBucket, check_elements
from torchbagua.runtime.runner import Runner
from torchbagua.training.wait_timer import WaitTimer


def comm_hook(state: Runner, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket: a DDP communication hook, for a loop without `attach`.

    Register it with `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`. DDP then calls it.

    It returns at once, and backward goes on while the bucket is communicated. There are three exceptions. In stream
    order QAdam first waits until ranks have compared how far they have come, which they begin at the end of a step.
    With a GradScaler QAdam and error feedback first read the loss scale, which the GPU has copied before the forward if
    `attach` was given the scaler. And where a stage of a warm-up may begin, ranks first agree on the number of steps.
    The bucket's buffer is changed in place. If the backend works in stream order, as those of GPUs do, gradients on a
    GPU stay there: all work is launched on one stream beside backward's. Otherwise the bytes that are sent pass through
    the host's memory.

    Under `torch.distributed.algorithms.Join`, a rank that has run out of data takes part with zeros. The mean is that
    of all ranks of the group, whatever `divide_by_initial_world_size` says. DDP leaves the division to its hook and
    does not tell it how many ranks still have data; torch's own hooks divide in the same way.

    Args:
        state: what `Algorithm.reify` returned, of an algorithm that averages gradients.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. If communication fails, backward raises a CommunicationError that names
            operation, bucket, rank and peer.

    Raises:
        TypeError: `state` is not what an algorithm that averages gradients has returned. Or `bucket` is none, since the
            module was made with `torch._dynamo.config.optimize_ddp = "python_reducer"`.
        RuntimeError: `state` is closed, or a CUDA graph is being captured. Or the algorithm needs to know which steps
            were taken, and was not told of any by the second backward: give `reify` the optimizer, or call
            `Runner.step_taken`.
        ValueError: gradients are sparse, neither on the CPU nor on a GPU, or of a dtype other than float64, float32,
            bfloat16, float16, complex128 and complex64.
    """
    if not isinstance(state, Runner) or state.averages_weights:
        got = f"that of {state.name}, which averages weights" if isinstance(state, Runner) else type(state).__name__
        raise TypeError(f"comm_hook: state must be what a gradient algorithm's reify returned, got {got}")
    if isinstance(bucket, tuple):  # (gradient, parameter); what a hook returns is then thrown away
        raise TypeError(
            "comm_hook: bucket must be a torch.distributed.GradBucket, got a tuple of gradient and parameter: the "
            'module was made with torch._dynamo.config.optimize_ddp = "python_reducer", under which DDP forms no '
            "buckets; wrap the model with another value of it"
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
        state.begin_backward(has_joined=not is_in_backward())
    own_bucket = state.gradient_bucket(bucket.parameters(), flat, index=bucket.index())
    work: BaguaBucket | WaitTimer = own_bucket
    if bucket.is_last() and state.tracer.is_on:
        work = WaitTimer(own_bucket, state.tracer, is_in_backward=not state.has_joined)
    # On this thread too, since the profiler does not follow the lane's unless it is told to.
    with state.tracer.range(own_bucket.name):
        state.use_device(flat.device)
        if state.process_group.world.in_stream_order(flat.device):
            launched = state.lane.launch(work.run)
            if bucket.is_last() and state.has_joined:
                state.end_joined_backward()
            return launched
        future = state.lane.submit_steps(work).future()
    if bucket.is_last() and state.has_joined:
        future.wait()  # DDP waits for it now, but hears of no error there
    return future
