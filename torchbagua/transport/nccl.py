"""An NCCL group of our own: connected ahead of its use, watched while it works, and closed within a bounded time."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchbagua._torch import backend_of
from torchbagua._warnings import warn_user
from torchbagua.transport.private_groups import nccl_group

# NCCL's own watchdog ends the process. It comes later, so that who watches can break off and raise before.
_WATCHDOG_LATER = timedelta(seconds=10)
# Breaking off may wait for the GPU, and so for what other groups have under way.
_LONGEST_ABORT_S = 10.0


class Launch(NamedTuple):
    """What a stream has been told to do, and where it is done."""

    purpose: str
    done: torch.cuda.Event
    at_s: float


class PrivateNccl:
    """A group of ranks that exchange tensors of GPUs among themselves and with nobody else.

    Args:
        store, rank, size: of the group.
        timeout: bound on every wait for another rank.

    Attributes:
        group: torch's.
        is_polled: whether somebody asks for what is under way; else launches are not noted.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.group = nccl_group(store, rank, size, timeout + _WATCHDOG_LATER)
        self.is_polled = False
        self._timeout_s = timeout.total_seconds()
        self._device: torch.device | None = None
        self._launches: deque[Launch] = deque()
        self._is_shut_down = False
        self._abort: threading.Thread | None = None

    def connect(self, device: torch.device) -> None:
        """Connect the ranks on this GPU, unless they are. Collective.

        Raises:
            TimeoutError: a rank did not come.
            RuntimeError: NCCL refuses.
        """
        if self._device is None:
            self._device = device
            self._run("connect", lambda: backend_of(self.group).eager_connect_single_device(device))

    def note(self, purpose: str) -> None:
        """Note that the current stream has been told to do `purpose`."""
        if self.is_polled:
            done = torch.cuda.current_stream(self._device).record_event()
            self._launches.append(Launch(purpose, done, time.monotonic()))

    def under_way(self) -> Launch | None:
        """Return the first that the GPU is not done with."""
        while self._launches and self._launches[0].done.query():
            self._launches.popleft()
        return self._launches[0] if self._launches else None

    def shut_down(self) -> None:
        """Finish what is under way, and close. Collective.

        Raises:
            TimeoutError: another rank did not take part; what is left to do is to abort.
        """
        if self._abort is None and not self._is_shut_down:
            self._run("shut down", self.group.shutdown)
            self._is_shut_down = True

    def abort(self) -> None:
        """Break off what is under way, and close; `join` waits for that."""
        if self._abort is None and not self._is_shut_down:
            self._abort = self._start("abort", self.group.abort, [])

    def join(self) -> None:
        """Wait until breaking off has come to its end, for some seconds at most."""
        if self._abort is not None:
            self._abort.join(_LONGEST_ABORT_S)

    def _run(self, what: str, function: Callable[[], object]) -> None:
        errors: list[BaseException] = []
        thread = self._start(what, function, errors)
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"NCCL did not {what} within {self._timeout_s:g} s")
        if errors:
            raise errors[0]

    def _start(self, what: str, function: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
        """Call a function that may not return on a thread of its own."""

        def run() -> None:
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"torchbagua: NCCL's {what}", daemon=True)
        thread.start()
        return thread


def warn_of_launch_order() -> None:
    """Warn where the environment makes two NCCL groups on one GPU wait for each other's launches."""
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        if os.environ.get(variable) == "1":
            warn_user(
                f"torchbagua: {variable}=1 is set, with which a GPU runs what two NCCL groups send in the order of "
                "their launches. Weights are sent over a group of their own, by a thread of its own: ranks on which it "
                "comes before and after what the training thread sends over NCCL wait for each other for ever. Unset "
                "it, or send nothing else over NCCL while the algorithm is attached"
            )
