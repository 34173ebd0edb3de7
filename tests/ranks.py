"""Ranks as threads of one process, each with a hand-made gloo group, alongside a default group as users have it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from devices import CPU
from torchbagua._torch import active_ddp, forget_active_ddp

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)
INSIDE_DDP_FORWARD = DistributedDataParallel._inside_ddp_forward


@contextmanager
def _inside_ddp_forward(ddp: DistributedDataParallel) -> Iterator[None]:
    """Replace DDP's method of this name, which crashes, rarely, if ranks are threads (torch 2.13): see active_ddp."""
    outer = active_ddp()
    DistributedDataParallel._active_ddp_module = ddp
    try:
        yield
    finally:
        inner = active_ddp()  # frees it after it is replaced
        DistributedDataParallel._active_ddp_module = outer
        del inner


DistributedDataParallel._inside_ddp_forward = _inside_ddp_forward


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta = TIMEOUT, device: torch.device = CPU
) -> dist.ProcessGroup:
    """Return a hand-made gloo group over `store`, for tensors on the CPU, and on `device` if it is another device."""
    prefixed = dist.PrefixStore("test", store)
    group = dist.ProcessGroup(prefixed, rank, size)
    backend = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device_type in dict.fromkeys(("cpu", device.type)):
        group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def init_default_group() -> None:
    """Ensure that torch has a default group; a new one uses gloo and has one rank. It remains for later tests."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def without_default_group() -> Iterator[None]:
    """Remove torch's default group, and at the end any default group that the block has created."""
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Groups:
    """Outer groups of ranks that are threads, which later tests use again: to close a socket takes gloo 10 ms."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, timedelta, torch.device], list[list[dist.ProcessGroup]]] = {}

    def take(self, size: int, timeout: timedelta, device: torch.device) -> list[dist.ProcessGroup]:
        """Return the groups of all ranks, in rank order."""
        free = self._free.setdefault((size, timeout, device), [])
        if free:
            return free.pop()
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as threads:
            return [*threads.map(lambda rank: gloo_group(store, rank, size, timeout, device), range(size))]

    def give_back(self, groups: list[dist.ProcessGroup], timeout: timedelta, device: torch.device) -> None:
        """Keep the groups for another test, unless a collective of the last one is left on some ranks."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=1)
        with suppress(RuntimeError):
            for work in [group.barrier(options) for group in groups]:
                work.wait()
            self._free[len(groups), timeout, device].append(groups)


_groups = Groups()


def run_ranks(
    size: int, body: Callable[[dist.ProcessGroup], T], timeout: timedelta = TIMEOUT, device: torch.device = CPU
) -> list[T]:
    """Run `body(group)` on `size` threads, one per rank, and return the results in rank order.

    The ranks share `device`, one GPU; DDP's own collectives on it use gloo.

    Raises the error of the lowest rank that raised. Errors of other ranks follow from it, or resemble it.
    """
    init_default_group()
    # Stored until all ranks are done: gloo can deadlock if a group's last reference is dropped, with the GIL held, just
    # after an all-reduce that backward has started (torch 2.13: its worker needs the GIL to free the work).
    groups = _groups.take(size, timeout, device)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            # Autograd has one thread per GPU. DDP's last callback blocks it to wait for other ranks, whose backward
            # would need it. So each rank's backward stays on the rank's own thread, as on the CPU.
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
    forget_active_ddp()  # frees it while no thread runs a forward; see active_ddp
    if errors:
        raise errors[min(errors)]
    _groups.give_back(groups, timeout, device)
    return [results[rank] for rank in range(size)]


def leave_by_exception(attachment: AbstractContextManager[object]) -> None:
    """Detach as a training that fails does: other ranks are not waited for, and nothing is averaged."""
    with suppress(ArithmeticError), attachment:
        raise ArithmeticError
