"""Private names of torch that Bagua's API cannot do without: why, and in which versions of torch they were seen.

tests/test_torch_private.py has a canary for each.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# torch.distributed. Bagua's communicators are among some ranks of any group, and torch's own new_group wants the whole
# world to take part. Seen in 2.11 to 2.13.

_GPU = torch.device("cuda")


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether NCCL moves tensors of GPUs in this group, also within TORCH_DISTRIBUTED_DEBUG=DETAIL's wrapper."""
    if not dist.is_nccl_available() or _GPU.type not in [device.type for device in group._device_types]:
        return False
    backend: Any = group._get_backend(_GPU)
    return isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupNCCL)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group, which connects when it is first used."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(_GPU, dist.ProcessGroup.BackendType.NCCL, backend)
    return group


# DistributedDataParallel. Seen in 2.11 to 2.13.


def ignore_names(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Have every DDP of `module` that is made from now on, and `attach`, ignore these too; return all that they ignore.

    DDP has no argument for it.
    """
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    every = sorted({*known, *names})
    if len(every) > len(known):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, every)
    return every


class DDPOfFunction(DistributedDataParallel):
    """A DDP that calls a function where torch's calls its module, whose hooks are then not called.

    Args:
        module: whose parameters it trains.
        function: called in place of the module.
        arguments: of DistributedDataParallel.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any], **arguments: Any) -> None:
        super().__init__(module, **arguments)
        self.function = function

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(*inputs, **kwargs)
