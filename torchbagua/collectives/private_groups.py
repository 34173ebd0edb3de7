"""Groups that torch's registry does not know: `new_group` wants the whole world to take part."""

from datetime import timedelta

import torch
import torch.distributed as dist


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group for tensors of the CPU. Collective."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group for tensors of GPUs, which connects when it is first used."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


# Torch's own functions (`dist.all_reduce` and its like) look the group up in torch's registry when they fail, and raise
# what that says of a group it does not know in place of the error.


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by that of the group's first rank."""
    _finish(group.broadcast(tensor, 0))


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over the ranks; NCCL's is launched on the current stream."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    _finish(group.allreduce([tensor], options))


def all_to_all(group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Send `inputs[r]` to each rank r and receive `outputs[r]` from it; NCCL's is launched on the current stream."""
    options = dist.AllToAllOptions()
    options.asyncOp = False
    _finish(group.alltoall(outputs, inputs, options))


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # NCCL returns none of what is on the current stream
        work.wait()


def has_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether NCCL is what moves tensors of GPUs in this group."""
    if torch.device("cuda") not in process_group._device_types:
        return False
    backend = process_group._get_backend(torch.device("cuda"))
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)
