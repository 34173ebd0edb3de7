"""Groups that torch's registry does not know: `torch.distributed.new_group` wants the whole world to take part."""

import atexit
import functools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import (
    gloo_devices,
    gloo_options,
    nccl_options,
    unregistered_group,
)

_GLOO_LETS_GO_S = 0.05


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, devices: Sequence[Any] | None = None
) -> dist.ProcessGroup:
    """Return a gloo group for tensors of the CPU. Collective.

    Args:
        store, rank, size, timeout: of the group.
        devices: what listens for connections and reads from them, to share it with other groups, which then have no
            more than one thread each for gloo's own collectives; by default the group gets its own.
    """
    _wait_at_exit_for_gloo()
    own = devices is None
    options = gloo_options(timeout, gloo_devices() if devices is None else devices, num_threads=2 if own else 1)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    return unregistered_group(store, rank, size, "cpu", dist.ProcessGroup.BackendType.GLOO, backend)


@functools.cache
def _wait_at_exit_for_gloo() -> None:
    # After whoever waited for a collective has gone on, a thread of gloo lets go of its tensors, and needs the GIL for
    # that. Once the interpreter ends it does not get it, and the process aborts ("terminate called without an active
    # exception"). Nothing tells whether it is done, so the end gives it the time. Plain torch aborts as well, where a
    # group outlives destroy_process_group (a DDP holds it) and the program ends right after a collective.
    atexit.register(time.sleep, _GLOO_LETS_GO_S)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group for tensors of GPUs, which connects when it is first used."""
    backend = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
    return unregistered_group(store, rank, size, "cuda", dist.ProcessGroup.BackendType.NCCL, backend)


def default_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """Return backends with their kinds, by types of devices: gloo for CPUs, and NCCL for GPUs if there are some."""
    kinds = dist.ProcessGroup.BackendType
    backends: dict[str, Any] = {"cpu": (kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))}
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        backends["cuda"] = (kinds.NCCL, nccl)
    return backends
