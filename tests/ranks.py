"""Ranks as threads of one process: each with a gloo group made by hand, beside a default group, as users have one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from devices import CPU

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta = TIMEOUT, device: torch.device = CPU
) -> dist.ProcessGroup:
    """Return a hand-made gloo group over `store`, for tensors of the CPU, and of `device` where that is another."""
    prefixed = dist.PrefixStore("test", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    backend = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device_type in dict.fromkeys(("cpu", device.type)):
        group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def init_default_group() -> None:
    """Make sure that torch has a default group, over gloo and of one rank; it stays for whatever comes after."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def without_default_group() -> Iterator[None]:
    """Take torch's default group away, and whatever is made of it meanwhile."""
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    size: int, body: Callable[[dist.ProcessGroup], T], timeout: timedelta = TIMEOUT, device: torch.device = CPU
) -> list[T]:
    """Run `body(group)` on `size` threads, one a rank, and return the results in rank order.

    The ranks share `device`, one GPU; DDP's own collectives on it are gloo's.

    Raises what the lowest rank raised that raised; the others' errors follow from it, or are its like.
    """
    init_default_group()
    store = dist.HashStore()
    # Kept until all ranks are done: gloo can deadlock where a group's last reference is let go, under Python's global
    # lock, just after an all-reduce that backward had started (torch 2.13: its worker needs the lock to free the work).
    groups: dict[int, dist.ProcessGroup] = {}
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            groups[rank] = gloo_group(store, rank, size, timeout, device)
            # Autograd has one thread for a GPU, and DDP's last callback waits for other ranks on it, whose backward
            # would need it: so every rank's backward stays on the rank's own thread, as it does on the CPU.
            with torch.autograd.set_multithreading_enabled(device == CPU):
                results[rank] = body(groups[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout.total_seconds() * 2)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]
