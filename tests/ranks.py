"""Ranks as threads of one process, each with a hand-made gloo group, alongside a default group as users have it."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

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
    return _group(prefixed, rank, size, device, dist.ProcessGroupGloo(prefixed, rank, size, timeout))


def _group(store: dist.Store, rank: int, size: int, device: torch.device, backend: Any) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
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


_connected: dict[tuple[int, timedelta], list[list[Any]]] = {}
"""Backends of all ranks that no test uses, by their number and timeout: to close a connection takes gloo 10 ms."""


@contextmanager
def _outer_groups(size: int, timeout: timedelta, device: torch.device) -> Iterator[list[dist.ProcessGroup]]:
    """Return the groups of all ranks. If the block succeeds, a later test uses their connections."""
    unused, store = _connected.setdefault((size, timeout), []), dist.HashStore()
    if unused:
        backends = unused.pop()
    else:
        with ThreadPoolExecutor(size) as threads:
            connect = functools.partial(dist.ProcessGroupGloo, dist.PrefixStore("connections", store))
            backends = [*threads.map(lambda rank: connect(rank, size, timeout), range(size))]
    yield [_group(store, rank, size, device, backend) for rank, backend in enumerate(backends)]
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=1)
    with suppress(RuntimeError):  # a collective that only some ranks called
        for work in [backend.barrier(options) for backend in backends]:
            work.wait()
        unused.append(backends)


def run_ranks(
    size: int, body: Callable[[dist.ProcessGroup], T], timeout: timedelta = TIMEOUT, device: torch.device = CPU
) -> list[T]:
    """Run `body(group)` on `size` threads, one per rank, and return the results in rank order.

    The ranks share `device`, one GPU; DDP's own collectives on it use gloo.

    Raises the error of the lowest rank that raised. Errors of other ranks follow from it, or resemble it.
    """
    init_default_group()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int, group: dist.ProcessGroup) -> None:
        try:
            # Autograd has one thread per GPU. DDP's last callback blocks it to wait for other ranks, whose backward
            # would need it. So each rank's backward stays on the rank's own thread, as on the CPU.
            with torch.autograd.set_multithreading_enabled(device == CPU):
                results[rank] = body(group)
        except BaseException as error:
            errors[rank] = error

    # Referenced until all ranks are done: gloo can deadlock if a group's last reference is dropped, with the GIL held,
    # just after an all-reduce that backward has started (torch 2.13: its worker needs the GIL to free the work).
    with _outer_groups(size, timeout, device) as groups:
        threads = [
            threading.Thread(target=run, args=(rank, group), name=f"rank {rank}", daemon=True)
            for rank, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout.total_seconds() * 2)
            assert not thread.is_alive(), f"{thread.name} hangs"
        forget_active_ddp()  # frees it while no thread runs a forward; see active_ddp
        if errors:
            raise errors[min(errors)]
    return [results[rank] for rank in range(size)]


def on_each_rank(size: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Return a decorator: a test runs on all ranks, with the rank's group before its other arguments."""

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            run_ranks(size, lambda group: test(group, **arguments))

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return run

    return decorate


def leave_by_exception(attachment: AbstractContextManager[object]) -> None:
    """Detach as a training that fails does: other ranks are not waited for, and nothing is averaged."""
    with suppress(ArithmeticError), attachment:
        raise ArithmeticError
