"""Private names of torch that this package cannot do without: why, and in which versions of torch they were seen.

tests/test_torch_private.py has a canary for each, which fails where a new torch has moved one.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import CodeType
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


# torch.distributed. Groups that torch's registry does not know are made by hand: torch's own new_group wants the whole
# world to take part. Seen in 2.11 to 2.13.


def unregistered_group(
    store: dist.Store, rank: int, size: int, device_type: str, kind: dist.ProcessGroup.BackendType, backend: Any
) -> dist.ProcessGroup:
    """Return a group whose tensors on devices of one type `backend` moves."""
    group = dist.ProcessGroup(store, rank, size)
    add_backends(group, {device_type: (kind, backend)})
    return group


def add_backends(group: dist.ProcessGroup, backends: Mapping[str, tuple[dist.ProcessGroup.BackendType, Any]]) -> None:
    """Have a group that was made by hand move the tensors of each type of devices by a backend, given with its kind."""
    for index, (device_type, (kind, backend)) in enumerate(backends.items()):
        if index == 0:
            group._set_default_backend(kind)
        group._register_backend(torch.device(device_type), kind, backend)


def registered_group(
    ranks: Sequence[int], rank: int, backend: str, store: dist.Store, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of some ranks of the job that torch's registry knows, as `torch.distributed.new_group` does.

    new_group names its groups after a count of those that this process knows (`use_local_synchronization`), or wants
    the whole world to take part. The count differs between ranks that are in groups of unequal number, and goes back
    when a group is destroyed: ranks then wait for each other under different names, or find what an earlier group of
    that name left in the store.

    Args:
        ranks: the members, by their numbers in the job; all of them call it.
        rank: the index of this rank there.
        backend: the name of a backend.
        store: has keys of this group alone.
        name: the same on all members, and no other group's.
        timeout: of the group's operations, if the backend has one.
    """
    group: dist.ProcessGroup
    place = len(ranks), rank, list(ranks)
    group, _ = distributed_c10d._new_process_group_helper(*place, dist.Backend(backend), store, name, timeout=timeout)  # type: ignore[arg-type]
    distributed_c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return group


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store that the group's members share; None if there is none, as in a world that MPI has started.

    Torch keeps the store of a group written in Python in its registry.
    """
    store: dist.Store | None = group.get_group_store()
    if store is None:
        _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    bare: Any = store
    while isinstance(bare, dist.PrefixStore):
        bare = bare.underlying_store
    return None if type(bare) is dist.Store else store  # the abstract class, of which the world of MPI has one


def work_of(future: "torch.futures.Future[Any]") -> dist.Work:
    """Return what a process group written in Python hands out for an operation that is done when `future` is."""
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


COLLECTIVES_WITH_GIL = tuple(
    name
    for name in (
        "allgather",
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "all_to_all_single",
        "alltoall_base",
        "barrier",
        "broadcast",
        "recv",
        "reduce_scatter",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "send",
    )
    if hasattr(dist.ProcessGroup, name)
)
"""The operations that a process group written in Python must define itself, if it has C++ backends.

torch holds the GIL while a backend starts one that such a group inherits (PyProcessGroup.hpp, torch 2.13). A thread of
gloo that frees a tensor needs the GIL and holds the lock that gloo takes at the start: a deadlock.
"""


def device_types_of(group: dist.ProcessGroup) -> list[str]:
    """Return the types of devices for which `group` has backends; none of a process group written in Python."""
    return [device.type for device in group._device_types]


def backend_of(group: dist.ProcessGroup, device_type: str | None = None) -> Any:
    """Return what moves tensors of a type of devices in `group`; None where nothing does. Default: its first type."""
    types = device_types_of(group)
    device_type = device_type or next(iter(types), "")
    return group._get_backend(torch.device(device_type)) if device_type in types else None


def all_gather_base(group: dist.ProcessGroup, output: torch.Tensor, own: torch.Tensor) -> dist.Work | None:
    """Start to receive all ranks' `own` in `output`, one after the other, on the current stream where it is NCCL's.

    The group's public methods take a list of tensors, into which NCCL then copies what it has received in one.
    """
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    work: dist.Work | None = group._allgather_base(output, own, options)
    return work


def reduce_scatter_base(group: dist.ProcessGroup, output: torch.Tensor, rows: torch.Tensor, op: Any) -> dist.Work:
    """Start to sum, or average, own row of all ranks' `rows` into `output`.

    torch's own function looks the group up in torch's registry, and the public method takes a list of tensors.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    work: dist.Work = group._reduce_scatter_base(output, rows, options)
    return work


def nccl_options(timeout: timedelta) -> Any:
    """Return options of a ProcessGroupNCCL whose operations may take so long."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def gloo_devices() -> list[Any]:
    """Return what listens for the connections of a ProcessGroupGloo: one for each interface in GLOO_SOCKET_IFNAME.

    Torch's constructor makes them itself if it is given none, but such that ranks connect at their first message where
    TORCH_GLOO_LAZY_INIT is set: closing a group of that kind may freeze the process (torch 2.13).
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces]
    return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]


def gloo_options(timeout: timedelta, devices: Sequence[Any], *, num_threads: int) -> Any:
    """Return options of a ProcessGroupGloo, whose `num_threads` for each device run its own collectives."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = num_threads * len(devices)
    options._timeout = timeout
    return options


def is_gloo(backend: Any) -> bool:
    """Return whether a backend is gloo's, also in what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps around it."""
    backend = getattr(backend, "wrapped_pg", backend)
    return dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)


def is_nccl(backend: Any) -> bool:
    """Return whether a backend is NCCL's, also in what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps around it."""
    backend = getattr(backend, "wrapped_pg", backend)
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the bound on every wait of the group's operations; torch's default if its backend does not tell."""
    try:
        timeout: timedelta = backend_of(group).options._timeout
    except (AttributeError, RuntimeError):  # there is no such backend; it is no C++ class, or has no options
        return default_pg_timeout
    return timeout


# DistributedDataParallel. Seen in 2.11 to 2.13.


def comm_hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return DDP's own list of hooks and their states: there is no way to ask whether one is registered.

    It grows also where a registration fails, so whoever registers one clears it.
    """
    return ddp._comm_hooks


def names_to_ignore(module: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers that a DDP of `module` will ignore."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def has_delayed_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Return whether it was made with delay_all_reduce_named_params, whose gradients bypass communication hooks."""
    return bool(ddp._delay_all_reduce_params)


def named_bucket_bytes(ddp: DistributedDataParallel) -> int | None:
    """Return the size of its buckets if the user has named one for all; None if it is DDP's default."""
    is_default = bool(ddp.bucket_bytes_cap_default) or bool(getattr(ddp, "bucket_bytes_cap_list", None))
    return None if is_default else int(ddp.bucket_bytes_cap)


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether compiled autograd reduces its gradients, which calls hooks with something else than a bucket."""
    return bool(ddp._use_python_reducer)


def is_stepped_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether `_apply_optimizer_in_backward` gave it an optimizer, which steps when its gradient is there."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Return whether `ddp` is in a Join context, or has been in one, which torch takes for the same."""
    return bool(ddp._join_config.enable)


def has_learnt_graph(ddp: DistributedDataParallel) -> bool:
    """Return False until the first backward of a DDP with static_graph, in which it notes which parameters are used."""
    return not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued


# FSDP2. A module on which fully_shard was called has a state with parameter groups, which communicate. Seen in 2.11 to
# 2.13.


def fsdp_param_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that an FSDPModule communicates together; none where it has no parameters."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def fsdp_shard_group(param_group: Any) -> dist.ProcessGroup | None:
    """Return the ranks over which its parameters are sharded; None where they are replicated as well, or alone."""
    mesh_info = param_group.mesh_info
    if mesh_info.replicate_mesh_dim is not None:
        return None
    group: dist.ProcessGroup = mesh_info.shard_process_group
    return group


def fsdp_replicate_group(param_group: Any) -> dist.ProcessGroup | None:
    """Return the ranks over which its parameters are replicated; None where they are not."""
    mesh_info = param_group.mesh_info
    if mesh_info.replicate_mesh_dim is None:
        return None
    group: dist.ProcessGroup = mesh_info.replicate_process_group
    return group


def fsdp_shards(param_group: Any) -> list[tuple[torch.nn.Parameter, int]]:
    """Return its parameters, each with the padded length of a shard, in the order in which they lie in a row."""
    return [(one.sharded_param, one.padded_sharded_param_size.numel()) for one in param_group.fsdp_params]


def fsdp_is_offloaded(param_group: Any) -> bool:
    """Return whether its sharded parameters are kept on the CPU while they are computed with elsewhere."""
    return any(one.offload_to_cpu for one in param_group.fsdp_params)


def fsdp_reduce_scatter(param_group: Any) -> tuple[Any, bool]:
    """Return what reduce-scatters its gradients, and whether that is torch's own."""
    comm = param_group._reduce_scatter_comm
    return comm, type(comm).__name__ == "DefaultReduceScatter"


def fsdp_all_reduce_hook(param_group: Any) -> Any:
    """Return what it calls with its reduce-scattered gradients, where there are no replicas of its own; or None."""
    return param_group._all_reduce_hook


def fsdp_all_reduces(param_group: Any) -> bool:
    """Return whether gradients are to be averaged over replicas in this backward, as `set_requires_all_reduce` said."""
    return bool(param_group.all_reduce_grads)


def fsdp_divide_factor(param_group: Any) -> float | None:
    """Return what `set_gradient_divide_factor` said; None for the number of ranks."""
    factor: float | None = param_group.gradient_divide_factor
    return factor


def fsdp_all_gather(param_group: Any) -> tuple[Any, bool]:
    """Return what gathers its weights, and whether that is torch's own."""
    comm = param_group._all_gather_comm
    return comm, type(comm).__name__ == "DefaultAllGather"


def fsdp_gathered_dtypes(param_group: Any) -> set[torch.dtype]:
    """Return the dtypes in which its parameters are gathered; where these are several, they are gathered as bytes."""
    cast = param_group.mp_policy.param_dtype
    dtypes = {one.sharded_param.dtype for one in param_group.fsdp_params}
    return {cast if cast is not None and dtype.is_floating_point else dtype for dtype in dtypes}


def fsdp_own_gathers(param_group: Any) -> list[tuple[torch.nn.Parameter, type]]:
    """Return its parameters whose class says how they are gathered, by `fsdp_pre_all_gather`, each with that class."""
    shards = [(one.sharded_param, one._sharded_local_tensor) for one in param_group.fsdp_params]
    return [(parameter, type(shard)) for parameter, shard in shards if hasattr(shard, "fsdp_pre_all_gather")]


def premultiplier(op: Any) -> float | None:
    """Return the factor of a PREMUL_SUM, None of another operation: there is no way to ask for either."""
    state = op.__getstate__()
    is_premultiplied = isinstance(state, tuple) and state[0] == dist.ReduceOp.PREMUL_SUM
    return float(state[1]) if is_premultiplied else None


# Autograd and tensors. Seen in 2.11 to 2.13.


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the backward under way; without one RuntimeError."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a function is called in backward when the parameter's gradient is there."""
    return bool(parameter._post_accumulate_grad_hooks)


def is_in_backward() -> bool:
    """Return whether a backward is under way on this thread: the engine has no question for it, and refuses a callback.

    Under Join DDP calls its hook outside of one, on a rank that has run out of data.
    """
    try:
        queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True


class _Failure:
    """What a future holds in place of a tensor: whoever takes it for one gets the error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __str__(self) -> str:
        """Raise the error: torch asks for these words where it finds that this is no tensor, as DDP's reducer does."""
        if isinstance(self._error, RuntimeError):
            raise self._error
        raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Hold nothing: torch pickles what a future of a GPU completes with, to find tensors in it."""
        return object, ()


def _raise_failure(value: object) -> None:
    if isinstance(value, _Failure):
        str(value)


def future_of(done: "torch.futures.Future[Any]", outcome: Callable[[], T]) -> "torch.futures.Future[T]":
    """Return a future of what `outcome` returns when `done` is; an error is raised as a RuntimeError, if it is none.

    Of a future that raises, torch makes an error of its own for DDP, whose message is the whole traceback; and of
    Future.set_exception one that says that the error is no tensor.
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
    """Return a number that grows with every write to the tensor in place."""
    return tensor._version


def foreach_max(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the maximum of each tensor, which stays on its device: a few launches for all of them."""
    return list(torch._foreach_max(list(tensors)))


def write_summary(writer: Any, summary: Any, num_steps: int) -> None:
    """Have a SummaryWriter write several points as one record, which takes far less time than add_scalar for each."""
    writer._get_file_writer().add_summary(summary, num_steps)


def leaves(values: Any) -> Iterable[Any]:
    """Return what lists, tuples and mappings within each other are made of, as DDP looks for tensors in them."""
    return _pytree.tree_leaves(values)


def is_profiling() -> bool:
    """Return whether torch.profiler is at work, on whatever thread: a range that nobody sees costs microseconds."""
    return bool(profiler._is_profiler_enabled)


# Optimizers and GradScaler. Seen in 2.11 to 2.13.


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can be given hooks: a class that does not call Optimizer.__init__ has none."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer class's `step` without the calls of hooks that torch puts around it at the first instance."""
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers of an optimizer that another steps in its place from warning that nobody calls its step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_told_to_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer is at a step that it skips: GradScaler calls it after an overflow too."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def has_overflown(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether GradScaler has found an Inf in the optimizer's gradients, since its scale was last updated."""
    return any(bool(one) for one in scaler._found_inf_per_device(optimizer).values())


def loss_scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the tensor of the loss scale, which `update` writes to; None before its first use, or if it is disabled.

    The public `get_scale` waits for the GPU.
    """
    return getattr(scaler, "_scale", None)


def leave_scaling_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Have GradScaler unscale the gradients of a fused optimizer, and skip its step, as of any other."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def scaled_step_code() -> CodeType:
    """Return the code with which a GradScaler that is enabled calls an optimizer that is not fused."""
    return torch.amp.GradScaler._maybe_opt_step.__code__


def replace_find_inf(scaler: torch.amp.GradScaler, replace: Callable[[FindInf], FindInf]) -> Callable[[], None]:
    """Put `replace(f)` in the place of the `f` that looks for Inf in an optimizer's gradients; returns what undoes it.

    Every way on which GradScaler does so leads through `_unscale_grads_`. The public `unscale_` is not called for fused
    optimizers; and to put an Inf into a gradient before, so that all ranks find one, takes a pass over all gradients
    after each backward, also of a micro-step.

    Raises:
        RuntimeError: this torch has no such function.
    """
    find_inf = getattr(scaler, "_unscale_grads_", None)
    if not callable(find_inf):
        raise RuntimeError(
            f"torchbagua: {type(scaler).__name__} of torch {torch.__version__} has no _unscale_grads_, through which "
            "ranks agree to skip a step; attach without grad_scaler, in bfloat16, or with an earlier torch"
        )
    scaler._unscale_grads_ = replace(find_inf)  # type: ignore[method-assign]
    return lambda: delattr(scaler, "_unscale_grads_")


# Devices and the dispatcher. Seen in 2.11 to 2.13.


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had used CUDA, and cannot use it."""
    return torch.cuda._is_in_bad_fork()


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether a kernel of `operator`, namespace::name, is registered for that key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key))
