"""Transports for GPU tensors over NCCL, in stream order: on the user's group, or on an abortable private group."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua._torch import backend_of, nccl_options, unregistered_group
from torchbagua._warnings import warn_user
from torchbagua.transport.base import (
    COLLECTIVES,
    LONGEST_ABORT_S,
    MOST_CONNECTED_AT_ONCE,
    Abilities,
    Members,
    TorchGroupCollectives,
    TransportError,
)
from torchbagua.transport.errors import cause_of

# NCCL's own watchdog kills the process. It fires this much later, so that our poller can abort and raise first.
_WATCHDOG_MARGIN = timedelta(seconds=10)

# For short and for long tensors NCCL sends over different connections.
_FIRST_LENGTHS = (1, 2**20)


class NcclTransport(TorchGroupCollectives):
    """Collectives over a torch group with NCCL, on which other code launches too. NCCL's watchdog bounds them."""

    name = "NCCL"
    abilities = Abilities(
        frozenset({"cuda"}), in_stream_order=True, has_messages=False, has_torch_group=True, collectives=COLLECTIVES
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def torch_group(self) -> dist.ProcessGroup:
        return self._group

    def abort(self) -> None:
        return  # it is the user's group


class PrivateNcclTransport(NcclTransport):
    """Collectives over a private NCCL group of the members, which connect before the first use.

    Closing the group takes a bounded time, and the group can be aborted while operations are in flight.
    """

    abilities = replace(NcclTransport.abilities, has_collective_close=True)

    def __init__(self, members: Members) -> None:
        super().__init__(nccl_group(members.store, members.rank, members.size, members.timeout + _WATCHDOG_MARGIN))
        self._size = members.size
        self._timeout_s = members.timeout.total_seconds()
        self._device: torch.device | None = None
        self._is_closed = False
        self._abort: threading.Thread | None = None

    def torch_group(self) -> dist.ProcessGroup:
        if self._abort is not None or self._is_closed:
            raise TransportError("the group is closed")
        return self._group

    def use_device(self, device: torch.device) -> None:
        if self._device is None:
            self._device = device
            self._run_bounded("connect", lambda: self._connect(device))

    def _connect(self, device: torch.device) -> None:
        """Connect the members, and use each kind of connection once.

        NCCL opens most connections at their first use. There it would block the thread that launches, without a bound.
        In a group of more than 32 ranks, two ranks connect at their first message, as over gloo.
        """
        backend_of(self._group).eager_connect_single_device(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for length in _FIRST_LENGTHS:
                part = torch.zeros(max(1, length // self._size), device=device)
                whole = torch.zeros(len(part) * self._size, device=device)
                self.all_reduce(whole)
                self.all_gather_into_tensor(whole, part)
                if self._size <= MOST_CONNECTED_AT_ONCE:
                    self.all_to_all_single(torch.empty_like(whole), whole)
        stream.synchronize()

    def close(self) -> None:
        if self._abort is None and not self._is_closed:
            self._run_bounded("shut down", self._group.shutdown)
            self._is_closed = True

    def abort(self) -> None:
        if self._abort is None and not self._is_closed:
            self._abort = self._start("abort", self._group.abort, [])

    def join(self) -> None:
        if self._abort is not None:
            self._abort.join(LONGEST_ABORT_S)  # the abort may wait for the GPU, and so for other groups' operations

    def _run_bounded(self, action: str, function: Callable[[], object]) -> None:
        errors: list[BaseException] = []
        thread = self._start(action, function, errors)
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise TransportError(f"NCCL did not {action} within {self._timeout_s:g} s")
        if errors:
            raise TransportError(cause_of(errors[0])) from errors[0]

    def _start(self, action: str, function: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
        """Call a function that may not return on a separate thread."""

        def run() -> None:
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"torchbagua: NCCL's {action}", daemon=True)
        thread.start()
        return thread


def warn_of_launch_order() -> None:
    """Warn if the environment makes two NCCL groups on one GPU wait for each other's launches."""
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        if os.environ.get(variable) == "1":
            warn_user(
                f"torchbagua: {variable}=1 is set, so a GPU runs the operations of two NCCL groups in launch order. A "
                "separate thread sends weights over a private NCCL group; ranks that launch these operations and the "
                "training thread's NCCL operations in different orders deadlock. Unset the variable, or send nothing "
                "else over NCCL while the algorithm is attached"
            )


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return an NCCL group for GPU tensors, which connects at its first use."""
    backend = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
    return unregistered_group(store, rank, size, "cuda", dist.ProcessGroup.BackendType.NCCL, backend)
