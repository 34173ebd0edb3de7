"""Private names of torch that this package needs: why, and the versions of torch in which they were checked.

tests/test_torch_private.py has a canary for each name, which fails if a new torch has moved the name.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

T = TypeVar("T")

FoundInf = dict[torch.device, torch.Tensor]
FindInf = Callable[..., FoundInf]


# torch.distributed. Groups outside torch's registry are constructed directly: torch's new_group requires the whole
# world to take part. Checked in 2.11 to 2.13.


def unregistered_group(
    store: dist.Store, rank: int, size: int, device_type: str, kind: dist.ProcessGroup.BackendType, backend: Any
) -> dist.ProcessGroup:
    """Return a group in which `backend` sends the tensors on devices of one type."""
    group = dist.ProcessGroup(store, rank, size)
    add_backends(group, {device_type: (kind, backend)})
    return group


def add_backends(group: dist.ProcessGroup, backends: Mapping[str, tuple[dist.ProcessGroup.BackendType, Any]]) -> None:
    """Register a backend for each device type in a directly constructed group; each backend is given with its kind."""
    for index, (device_type, (kind, backend)) in enumerate(backends.items()):
        if index == 0:
            group._set_default_backend(kind)
        group._register_backend(torch.device(device_type), kind, backend)


def group_without_effect(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Return a group whose collectives return at once and send nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup  # only simulations need it

    kind, backend = dist.ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(rank, size)
    return unregistered_group(store, rank, size, "cpu", kind, backend)


def registered_group(
    ranks: Sequence[int], rank: int, backend: str, store: dist.Store, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of a subset of the job's ranks, registered with torch as `torch.distributed.new_group` does.

    new_group requires the whole world to take part, or, with `use_local_synchronization`, names a group after the
    number of groups that this process knows. This number differs between ranks that are members of different numbers of
    groups, and decreases when a group is destroyed. Ranks then wait for each other under different names, or read the
    keys that an earlier group of the same name left in the store.
    """
    group: dist.ProcessGroup
    place = len(ranks), rank, list(ranks)
    group, _ = distributed_c10d._new_process_group_helper(*place, dist.Backend(backend), store, name, timeout=timeout)  # type: ignore[arg-type]
    distributed_c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return group


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store that the group's members share; None if there is none, as in a world started by MPI.

    Torch stores the store of a process group written in Python in its registry.
    """
    store: dist.Store | None = group.get_group_store()
    if store is None:
        _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    bare: Any = store
    while isinstance(bare, dist.PrefixStore):
        bare = bare.underlying_store
    return None if type(bare) is dist.Store else store  # MPI's world has an instance of the abstract class


def device_types_of(group: dist.ProcessGroup) -> list[str]:
    """Return the device types for which `group` has backends; empty for a process group written in Python."""
    return [device.type for device in group._device_types]


def backend_of(group: dist.ProcessGroup, device_type: str | None = None) -> Any:
    """Return the backend of a device type in `group`, or None if it has none. Default: the first device type."""
    types = device_types_of(group)
    device_type = device_type or next(iter(types), "")
    return group._get_backend(torch.device(device_type)) if device_type in types else None


def all_gather_base(group: dist.ProcessGroup, output: torch.Tensor, own: torch.Tensor) -> dist.Work | None:
    """Start an all-gather of `own` into `output`, in rank order; NCCL runs it on the current stream.

    The group's public methods take a list of tensors, and NCCL then copies the received tensor into this list.
    """
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    work: dist.Work | None = group._allgather_base(output, own, options)
    return work


def reduce_scatter_base(group: dist.ProcessGroup, output: torch.Tensor, rows: torch.Tensor, op: Any) -> dist.Work:
    """Start a reduce-scatter: sum or average this rank's row of all ranks' `rows` into `output`.

    torch's function looks the group up in torch's registry, and the public method takes a list of tensors.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    work: dist.Work = group._reduce_scatter_base(output, rows, options)
    return work


def nccl_options(timeout: timedelta) -> Any:
    """Return options of a ProcessGroupNCCL with this timeout for its operations."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def gloo_devices() -> list[Any]:
    """Return the devices on which a ProcessGroupGloo listens: one for each interface in GLOO_SOCKET_IFNAME.

    If torch's constructor is given none, it creates them. With TORCH_GLOO_LAZY_INIT, their ranks connect only at the
    first message, and closing such a group may block forever (torch 2.13).
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces]
    return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]


def gloo_options(timeout: timedelta, devices: Sequence[Any], *, num_threads: int) -> Any:
    """Return options of a ProcessGroupGloo with `num_threads` threads per device, which run gloo's own collectives."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = num_threads * len(devices)
    options._timeout = timeout
    return options


def is_gloo(backend: Any) -> bool:
    """Return whether a backend is gloo, also inside the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = getattr(backend, "wrapped_pg", backend)
    return dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)


def is_nccl(backend: Any) -> bool:
    """Return whether a backend is NCCL, also inside the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = getattr(backend, "wrapped_pg", backend)
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's operations; torch's default if its backend does not expose one."""
    try:
        timeout: timedelta = backend_of(group).options._timeout
    except (AttributeError, RuntimeError):  # no backend, a backend written in Python, or no options
        return default_pg_timeout
    return timeout


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives and messages this process has issued on a group, or 0 if its backend counts none."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # MPI, and backends of other packages
        return 0


# DistributedDataParallel. Checked in 2.11 to 2.13.


def remove_autograd_hooks(ddp: DistributedDataParallel) -> None:
    """Have the reducer of a DDP do nothing in a later backward of its module, even if its last backward has failed."""
    ddp.reducer._remove_autograd_hooks()


def comm_hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return DDP's list of hooks and their states: no public method tells whether a hook is registered.

    A failed registration also appends to the list, so the caller that registers a hook must clear the list.
    """
    return ddp._comm_hooks


def names_to_ignore(module: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers that a DDP of `module` will ignore."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def has_delayed_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP was created with delay_all_reduce_named_params; these gradients bypass communication hooks."""
    return bool(ddp._delay_all_reduce_params)


def named_bucket_bytes(ddp: DistributedDataParallel) -> int | None:
    """Return the bucket size if the user has set one for all buckets; None if it is DDP's default."""
    is_default = bool(ddp.bucket_bytes_cap_default) or bool(getattr(ddp, "bucket_bytes_cap_list", None))
    return None if is_default else int(ddp.bucket_bytes_cap)


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether compiled autograd reduces the gradients; it calls hooks with an object other than a bucket."""
    return bool(ddp._use_python_reducer)


def is_stepped_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether `_apply_optimizer_in_backward` gave it an optimizer, which steps once its gradient is computed."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Return whether `ddp` is in a Join context, or has been in one: torch does not distinguish the two."""
    return bool(ddp._join_config.enable)


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP whose forward is running. All threads share it: it may be another thread's."""
    # An attribute of a class is read from a cache without references (CPython 3.11): while another thread replaces and
    # frees a DDP that only the class refers to, the cache returns the freed one.
    running: DistributedDataParallel | None = vars(DistributedDataParallel)["_active_ddp_module"]
    return running


def forget_active_ddp() -> None:
    """Forget the DDP whose forward runs. Ranks that are threads of one process may leave one behind."""
    running = active_ddp()  # frees it after it is replaced
    DistributedDataParallel._active_ddp_module = None
    del running


def has_learnt_graph(ddp: DistributedDataParallel) -> bool:
    """Return False until the first backward of a DDP with static_graph, which records the used parameters."""
    return not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued


# Autograd and tensors. Checked in 2.11 to 2.13.


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the current backward; RuntimeError outside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Return whether this thread is in a backward.

    With Join, DDP calls its hook outside a backward on a rank that has run out of data.
    """
    return current_backward() >= 0


def current_backward() -> int:
    """Return the number of this thread's backward, unique in the process; -1 outside a backward.

    A reentrant checkpoint runs a nested backward, which has another number.
    """
    return torch._C._current_graph_task_id()


class _Failure:
    """The value of a future instead of a tensor: code that uses it as a tensor raises the error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __str__(self) -> str:
        """Raise the error: torch, for example DDP's reducer, calls this after it finds that this is not a tensor."""
        if isinstance(self._error, RuntimeError):
            raise self._error
        raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as an empty object: torch pickles the value of a GPU future to find tensors in it."""
        return object, ()


def _raise_failure(value: object) -> None:
    if isinstance(value, _Failure):
        str(value)


def future_of(done: "torch.futures.Future[Any]", outcome: Callable[[], T]) -> "torch.futures.Future[T]":
    """Return a future of the value of `outcome()`, called when `done` completes; errors are raised as RuntimeError.

    An error becomes the value of the future, a `_Failure`, and is raised by the code that reads the value. If a future
    itself raises, torch gives DDP an error with the whole traceback as its message. After Future.set_exception, the
    error says that the exception is not a tensor.
    """

    def complete(_: object) -> T | _Failure:
        try:
            return outcome()
        except BaseException as error:
            return _Failure(error)

    future: torch.futures.Future[Any] = done.then(complete)
    future._set_unwrap_func(_raise_failure)
    return future


def num_writes(tensor: torch.Tensor) -> int:
    """Return a counter that increases with every in-place write to the tensor."""
    return tensor._version


def foreach_max(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the maximum of each tensor, on its device, with a few launches for all tensors."""
    return list(torch._foreach_max(list(tensors)))


def write_summary(writer: Any, summary: Any, num_steps: int) -> None:
    """Have a SummaryWriter write several points as one record, which is far faster than one add_scalar per point."""
    writer._get_file_writer().add_summary(summary, num_steps)


def leaves(values: Any) -> Iterable[Any]:
    """Return the leaves of nested lists, tuples and mappings, as DDP does to find tensors in them."""
    return _pytree.tree_leaves(values)


def is_profiling() -> bool:
    """Return whether torch.profiler is running, on any thread: a range that is not recorded costs microseconds."""
    return bool(profiler._is_profiler_enabled)


def call_at_compilation(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that a compiled function calls only when it is compiled, and without a break of its graph.

    The public torch.compiler.assume_constant_result imports the compiler, which takes seconds.
    """

    def call_now() -> None:
        call()

    call_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call_now


# Optimizers and GradScaler. Checked in 2.11 to 2.13.


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer accepts hooks: a class that does not call Optimizer.__init__ does not."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer class's `step` without the hook calls that torch wraps around it at the first instance."""
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers from warning that an optimizer never steps, if another optimizer steps instead."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_told_to_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer skips its current step: GradScaler calls it after an overflow too."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def has_overflown(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether GradScaler has found an Inf in the optimizer's gradients since the last update of its scale."""
    return any(bool(found_inf) for found_inf in scaler._found_inf_per_device(optimizer).values())


def loss_scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the tensor of the loss scale, which `update` writes to; None if it is unused so far, or disabled.

    The public `get_scale` waits for the GPU.
    """
    return getattr(scaler, "_scale", None)


def leave_scaling_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Have GradScaler unscale the gradients of a fused optimizer, and skip its step, as with any other optimizer."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


class _NotFused:
    """False, as the value of `_step_supports_amp_scaling`: GradScaler reads it right before it steps the optimizer."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        for listener in tuple(self.listeners):
            listener()
        return False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as False."""
        return bool, ()


def call_before_scaled_step(optimizer: torch.optim.Optimizer, listener: Callable[[], None]) -> Callable[[], None]:
    """Have an enabled GradScaler call `listener` right before it steps the optimizer; return a function that undoes it.

    A fused optimizer is left as it is: see `is_scaled_in_step`.
    """
    probe = getattr(optimizer, "_step_supports_amp_scaling", None)
    if not isinstance(probe, _NotFused):
        if probe:
            return lambda: None
        probe = optimizer._step_supports_amp_scaling = _NotFused()  # type: ignore[attr-defined]
    probe.listeners.append(listener)

    def undo() -> None:
        probe.listeners.remove(listener)
        if not probe.listeners:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    return undo


def is_scaled_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an enabled GradScaler is stepping a fused optimizer."""
    return getattr(optimizer, "found_inf", None) is not None


def replace_find_inf(scaler: torch.amp.GradScaler, replace: Callable[[FindInf], FindInf]) -> Callable[[], None]:
    """Replace the `f` that finds Inf in an optimizer's gradients with `replace(f)`; return a function that undoes it.

    Every path of GradScaler calls `_unscale_grads_` for it. The public `unscale_` is not called for fused optimizers.
    The alternative, writing an Inf into a gradient so that all ranks find one, needs a pass over all gradients after
    each backward, also after a micro-step.
    """
    find_inf = getattr(scaler, "_unscale_grads_", None)
    if not callable(find_inf):
        raise RuntimeError(
            f"torchbagua: {type(scaler).__name__} of torch {torch.__version__} has no _unscale_grads_, which ranks "
            "need to agree to skip a step; attach without grad_scaler, train in bfloat16, or use an earlier torch"
        )
    scaler._unscale_grads_ = replace(find_inf)  # type: ignore[method-assign]
    return lambda: delattr(scaler, "_unscale_grads_")


# Devices and the dispatcher. Checked in 2.11 to 2.13.


def is_forked_from_cuda() -> bool:
    """Return whether this process cannot use CUDA because it was forked from a process that had used it."""
    return torch.cuda._is_in_bad_fork()


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether a kernel of `operator`, namespace::name, is registered for this key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key))
