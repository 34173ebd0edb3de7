"""Groups outside of torch's registry: `torch.distributed.new_group` requires all ranks of the world to take part."""

import atexit
import functools
import time
from collections.abc import Sequence
from contextlib import suppress
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
from torchbagua.transport.store_requests import StoreRequests

_GLOO_RELEASE_S = 0.05
# One for each interface in GLOO_SOCKET_IFNAME, of which each has its own connections, and serves every n-th tag.
_UNUSED_TAGS = range((1 << 31) - 8, 1 << 31)


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, devices: Sequence[Any] | None = None
) -> dist.ProcessGroup:
    """Return a gloo group for CPU tensors. Collective.

    Args:
        store, rank, size, timeout: of the group.
        devices: the gloo devices, which listen for connections and read from them, shared with other groups. Such a
            group has one thread for gloo's own collectives. By default the group gets its own devices and two threads.
    """
    _wait_at_exit_for_gloo()
    own = devices is None
    options = gloo_options(timeout, gloo_devices() if devices is None else devices, num_threads=2 if own else 1)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    return unregistered_group(store, rank, size, "cpu", dist.ProcessGroup.BackendType.GLOO, backend)


def end_waits(backend: Any, peer: int) -> None:
    """End all waits of a gloo group, here and on its peers, with an error.

    gloo cannot abort (torch 2.13: `abort` does nothing). But a wait that times out closes the connections to all peers.
    """
    for tag in _UNUSED_TAGS:
        with suppress(RuntimeError):
            backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))


@functools.cache
def _wait_at_exit_for_gloo() -> None:
    # After the wait for a collective returns, a gloo thread releases the collective's tensors, which requires the GIL.
    # Once the interpreter shuts down, the thread cannot get the GIL, and the process aborts ("terminate called without
    # an active exception"). Whether the thread is done cannot be queried, so the exit waits. Plain torch aborts too, if
    # a group outlives destroy_process_group (a DDP references it) and the program ends right after a collective.
    atexit.register(time.sleep, _GLOO_RELEASE_S)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group for GPU tensors, which connects at its first use."""
    backend = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
    return unregistered_group(store, rank, size, "cuda", dist.ProcessGroup.BackendType.NCCL, backend)


def default_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """Return backends with their kinds, by device type: gloo for CPUs, and NCCL if it and a GPU are available."""
    kinds = dist.ProcessGroup.BackendType
    requests = StoreRequests(store, timeout)
    gloo = requests.open_group(lambda store: dist.ProcessGroupGloo(store, rank, size, timeout))
    backends: dict[str, Any] = {"cpu": (kinds.GLOO, gloo)}
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        backends["cuda"] = (kinds.NCCL, nccl)
    return backends
