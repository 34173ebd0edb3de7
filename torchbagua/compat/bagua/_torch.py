"""Private names of torch that Bagua's API needs: why, and the versions of torch in which they were checked.

tests/test_torch_private.py has a canary for each name.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# torch.distributed. Bagua's communicators span a subset of the ranks of any group, but torch's new_group requires the
# whole world to take part. Checked in 2.11 to 2.13.

_GPU = torch.device("cuda")


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether this group uses NCCL for GPU tensors, also in the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    if not dist.is_nccl_available() or _GPU.type not in [device.type for device in group._device_types]:
        return False
    backend: Any = group._get_backend(_GPU)
    return isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupNCCL)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group, which connects at its first use."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(_GPU, dist.ProcessGroup.BackendType.NCCL, backend)
    return group


# DistributedDataParallel. Checked in 2.11 to 2.13.


def ignore_names(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Have `attach`, and every DDP of `module` created later, ignore these names too; return all ignored names.

    DDP has no argument for this.
    """
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    every = sorted({*known, *names})
    if len(every) > len(known):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, every)
    return every


class DDPOfFunction(DistributedDataParallel):
    """A DDP that calls a function instead of its module, so the module's hooks do not run.

    Args:
        module: the module with the parameters to train.
        function: the function to call instead of the module.
        arguments: arguments of DistributedDataParallel.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any], **arguments: Any) -> None:
        super().__init__(module, **arguments)
        self.function = function

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(*inputs, **kwargs)
