"""The communication hook of DDP, which runs a gradient algorithm, and its installation.

`attach` has DDP call the hook. *The standalone hook* is the same hook, registered by the user with
`ddp.register_comm_hook` instead of `attach`. The runner then knows neither the module nor the parameters' names, and
knows an optimizer only if `reify` was given one.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchbagua import _concurrency
from torchbagua._torch import (
    active_ddp,
    comm_hooks_of,
    current_backward,
    queue_callback,
    remove_autograd_hooks,
)
from torchbagua.observe.events import Timestamp
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.bucket import BaguaBucket, check_elements
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.meeting import Meeting, OpeningBucket

_HELD = "_torchbagua_hook"  # on a DDP

_COPIED = "torchbagua: averaged by DDP"  # the state of the hook in the list of a copied DDP

Hook = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


class ModuleHook:
    """A hook of a module or of its forward. In a copied or unpickled module it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a no-op function of the standard library, so that loading the pickle does not need this package."""
        return getattr, (nullcontext(), "__exit__")


def call_before_forward(modules: Sequence[torch.nn.Module], call: Callable[[Any], None], undo: ExitStack) -> None:
    """Call `call` with the inputs before each forward of a module in training, until `undo` is closed."""

    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        # A shallow copy of a module shares its hooks, but they must act on the original only.
        if module in modules and module.training and torch.is_grad_enabled():
            call(inputs)

    for module in modules:
        undo.callback(module.register_forward_pre_hook(ModuleHook(before_forward)).remove)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `module`, by name."""
    return chain(module.named_parameters(), module.named_buffers())


class HeldHook:
    """Owns a hook, as an attribute of the DDP that calls it.

    A hook may refer to the DDP. The garbage collector then frees both together.
    """

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Become None in a copy."""
        return type(None), ()


class Trampoline:
    """The state of the single hook that DDP keeps for its lifetime. It refers to the attached hook, if any.

    The reference is weak, since the garbage collector does not see the reducer's references.
    """

    held: weakref.ref[HeldHook] | None = None

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module_id = id(module)
        self.process_group = module.process_group


class _Listed(tuple[Any, Any]):
    """The hook and its state in DDP's list. A copy of the DDP has the list, but no hook in its reducer (torch 2.13)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((allreduce_hook, _COPIED),)


def _trampoline_hook(state: Trampoline, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    held = None if state.held is None else state.held()
    if held is None:
        return allreduce_hook(state.process_group, bucket)
    return held.hook(bucket)


def check_no_foreign_hook(module: DistributedDataParallel) -> None:
    """Raise ValueError if `module` has a communication hook that torchbagua did not install."""
    for hook, state in comm_hooks_of(module):
        if not isinstance(state, Trampoline) and not (isinstance(state, str) and state == _COPIED):
            raise ValueError(
                f"attach: the module has the communication hook {hook.__qualname__} already, and DDP takes only one; "
                "wrap the model again without it"
            )


def install_hook(module: DistributedDataParallel, hook: Hook, undo: ExitStack) -> None:
    """Have DDP call `hook` with its gradient buckets until `undo` is closed; DDP then averages again."""
    trampoline = _trampoline_of(module)
    held = HeldHook(hook)
    setattr(module, _HELD, held)
    trampoline.held = weakref.ref(held)
    undo.callback(delattr, module, _HELD)
    undo.callback(setattr, trampoline, "held", None)


def _trampoline_of(module: DistributedDataParallel) -> Trampoline:
    """Return the module's trampoline; register it if the module has none yet."""
    check_no_foreign_hook(module)
    hooks = comm_hooks_of(module)
    for _, state in hooks:
        if isinstance(state, Trampoline) and state.module_id == id(module):
            return state
    hooks.clear()
    trampoline = Trampoline(module)
    try:
        module.register_comm_hook(trampoline, _trampoline_hook)
    except RuntimeError as error:
        hooks.clear()  # DDP may have listed the hook before it rejected it
        raise ValueError(f"attach: DDP takes no communication hook for this module: {error}") from error
    hooks[:] = [_Listed(hooks[0])]
    return trampoline


def abandon_ddp(ddp: DistributedDataParallel) -> None:
    """Have `ddp` do nothing in a later backward, and refuse its forward. Its module may be wrapped again without it."""
    inner, old = ddp.module, weakref.ref(ddp)

    def refuse(module: torch.nn.Module, inputs: Any) -> None:
        if module is old():  # a shallow copy shares this hook
            raise RuntimeError(
                "torchbagua: this DistributedDataParallel was abandoned, since a rank failed; wrap its module again"
            )

    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if active_ddp() is None or module is not inner:
            return
        if old() is not None:
            gc.collect()
        if (kept := old()) is not None:
            gc.unfreeze()  # get_referrers does not search what is frozen
            holders = sorted({_name_holder(each) for each in gc.get_referrers(kept) if each is not sys._getframe()})
            raise RuntimeError(
                "torchbagua: the module was wrapped again while its earlier DistributedDataParallel, which was "
                f"abandoned, is still referenced by {' and '.join(holders) or 'a variable of a running function'}; "
                "delete the references, which keep the memory of its buckets"
            )
        handle.remove()

    remove_autograd_hooks(ddp)
    ddp.register_forward_pre_hook(ModuleHook(refuse))
    handle = inner.register_forward_pre_hook(ModuleHook(before_forward))


def _name_holder(holder: Any) -> str:
    if isinstance(holder, FrameType):
        code = holder.f_code
        return f"a variable of {code.co_name} ({code.co_filename}:{holder.f_lineno}), perhaps in a stored exception"
    if isinstance(holder, dict) and "__name__" in holder:
        return f"a global variable of {holder['__name__']}"
    return f"an object of the class {type(holder).__name__}"


class WaitTimer:
    """Runs the last bucket of a backward and notifies observers of the wait. Ends the step if no optimizer does.

    Execution order:

    1. DDP's hook creates the timer, which queues a callback with the autograd engine, and submits it to the lane. The
       lane records when the bucket is done.
    2. The hook returns, and DDP queues its own callback with the autograd engine, behind the timer's.
    3. Once all gradients are computed, the timer's callback records the start of the wait and queues a second callback.
    4. DDP's callback waits for all buckets and copies the means into the gradients.
    5. The timer's second callback notifies observers of the wait. It does so only after DDP's copies, which DDP makes
       with or without communication.
    """

    def __init__(self, last: BaguaBucket, tracer: Tracer, *, is_in_backward: bool, ends_step: bool) -> None:
        self._last = last
        self._tracer = tracer
        self._ends_step = ends_step
        self._begun: Timestamp = 0
        self._done: Timestamp = 0
        if is_in_backward:
            queue_callback(self._begin)

    def run(self) -> torch.Tensor:
        """Reduce the bucket."""
        flat = self._last.run()
        self._note_end()
        return flat

    def may_begin(self) -> bool:
        """Return whether the bucket may begin while the previous bucket is in flight."""
        return self._last.may_begin()

    def run_overlapping(self) -> Generator[None, None, torch.Tensor]:
        """Reduce the bucket step by step."""
        flat = yield from self._last.run_overlapping()
        self._note_end()
        return flat

    def _note_end(self) -> None:
        self._done = self._tracer.now()
        if self._ends_step:
            self._tracer.end_step()

    def _begin(self) -> None:
        self._begun = self._tracer.now()
        queue_callback(self._end)

    def _end(self) -> None:
        self._tracer.tell("wait", self._begun, self._done)
        if not self._tracer.has_optimizer:
            self._tracer.end_step()


def comm_hook(state: GradientRunner, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of one DDP bucket: a DDP communication hook, for a loop without `attach`.

    Register it with `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`. DDP then calls it.

    The hook returns at once, so backward overlaps with the communication of the bucket. It blocks in four cases:

    - In stream order, QAdam first waits until ranks have compared their progress, which they begin to do at the
      end of a step.
    - With a GradScaler, QAdam and error feedback first read the loss scale. If `attach` was given the scaler, the GPU
      copied the scale before the forward.
    - If a stage of a warm-up may begin, ranks first agree on the number of steps.
    - With `torch.distributed.algorithms.Join`, a rank that has run out of data waits for the last bucket of a backward,
      except in stream order.

    The bucket's buffer is changed in place. If the backend works in stream order, as GPU backends do, gradients on a
    GPU stay there, and all work is launched on one stream alongside backward's stream. Otherwise the bytes to send are
    copied through host memory.

    With `torch.distributed.algorithms.Join`, a rank that has run out of data contributes zeros. The mean is always over
    all ranks of the group, whatever the value of `divide_by_initial_world_size`: DDP leaves the division to its hook
    and does not tell it how many ranks still have data. Torch's own hooks divide in the same way.

    Args:
        state: the GradientRunner that `Algorithm.reify` of a gradient algorithm returned.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's buffer. If communication fails, backward raises a CommunicationError that names
            operation, bucket, rank and peer.

    Raises:
        TypeError: `state` is not the Runner of a gradient algorithm. Or `bucket` is not a GradBucket, since the module
            was created with `torch._dynamo.config.optimize_ddp = "python_reducer"`.
        RuntimeError: `state` is closed, or a CUDA graph is being captured. Or the algorithm needs to know which steps
            were taken, and was not notified of any by the second backward: give `reify` the optimizer, or call
            `GradientRunner.step_taken`.
        ValueError: gradients are sparse, neither on the CPU nor on a GPU, or of a dtype other than float64, float32,
            bfloat16, float16, complex128 and complex64.
    """
    if not isinstance(state, GradientRunner):
        name = getattr(state, "name", None)
        got = type(state).__name__ if name is None else f"that of {name}, which averages weights"
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
        job = state.lane.submit_overlapping(
            work if meeting is None else OpeningBucket(meeting, work, gradient_bucket.name)
        )
    future = job.future()
    before = state.note_job(job, is_first=bucket.index() == 0, is_last=bucket.is_last())
    if bucket.is_last() and not state.has_joined and flat.is_cpu:
        # Runs before DDP's callback, whose waits would delay signal handlers: DDP queues it after this hook returns. Of
        # several buckets, it leaves the last one to DDP, which copies the other means into the gradients meanwhile.
        queue_callback((before or job).wait)
    if bucket.is_last() and state.has_joined:
        _concurrency.wait_for(future)  # DDP waits for it now, but ignores its error
    return future
