"""A GPU and NCCL that are not there and do nothing: what a host does for them can then be counted and timed.

Every tensor says that it lies on the first GPU, while its memory is the host's. Kernels of torchbagua, writes to
tensors, and what is asked of NCCL are noted and not done, so that contents mean nothing. It is for a process of its
own: nothing undoes it.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it, which fails once there is a pretended GPU
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)

ALLOCATIONS = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "full_like")
WRITES = ("copy_", "zero_", "fill_", "add_", "div_", "mul_")
COLLECTIVES = (
    *("allreduce", "broadcast", "reduce", "gather", "scatter", "send", "recv"),
    *("alltoall", "alltoall_base", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"),
    *("allreduce_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)


class PretendedNccl(dist.ProcessGroup):
    """A process group of torch, and its backend, over which nothing is sent.

    Attributes:
        calls: what has been asked of it, by the name of the method.
    """

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: Counter[str] = Counter()
        self.options = SimpleNamespace(_timeout=timedelta(seconds=60))
        self._store = store
        for name in COLLECTIVES:
            setattr(self, name, noted(self.calls, name))

    @property
    def _device_types(self) -> list[torch.device]:
        return [GPU]

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> "PretendedNccl":
        return self


class PretendedStream:
    """A stream, and every event in it: whatever is asked of it has been done."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def record_event(self, *arguments: object) -> "PretendedStream":
        return self

    record = wait = wait_event = wait_stream = synchronize = record_event

    def query(self) -> bool:
        return True


class HostFuture(torch.futures.Future[Any]):
    """A future that does without the events which it would record on a GPU."""

    def __new__(cls, *, devices: object = None) -> "HostFuture":
        return super().__new__(cls)

    def __init__(self, *, devices: object = None) -> None:
        super().__init__()


def pretend_gpu() -> "Counter[str]":
    """Let torch have a GPU and NCCL from now on; return the kernels that will have been launched, by name.

    Comes after `torchbagua.native.load()`, which finds the operations of the host.
    """
    launches: Counter[str] = Counter()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operation = name.partition("::")
        if space == "torchbagua":
            replace(torch.ops.torchbagua, **{operation: noted(launches, operation)})
    replace(torch, **{name: on_host(getattr(torch, name)) for name in ALLOCATIONS})
    replace(torch.Tensor, **{name: noted(launches, name, lambda written, *rest: written) for name in WRITES})
    replace(
        torch.Tensor,
        is_cuda=True,
        device=property(lambda tensor: GPU),
        to=moved_nowhere(torch.Tensor.to),
        pin_memory=lambda tensor: tensor,
        record_stream=lambda tensor, stream: None,
    )
    stream = PretendedStream()
    replace(
        torch.cuda,
        Stream=PretendedStream,
        Event=PretendedStream,
        current_stream=lambda device=None: stream,
        stream=contextlib.nullcontext,
        set_device=lambda device: None,
        is_current_stream_capturing=lambda: False,
    )
    replace(torch.futures, Future=HostFuture)
    replace(
        dist,
        is_nccl_available=lambda: True,
        ProcessGroupNCCL=PretendedNccl,
        # The gloo groups that ranks have beside NCCL would connect them.
        ProcessGroupGloo=PretendedGloo,
    )
    return launches


class PretendedGloo:
    """In place of `torch.distributed.ProcessGroupGloo`."""

    _Options = SimpleNamespace

    def __new__(cls, store: dist.Store, rank: int, size: int, options: object) -> Any:
        return FakeProcessGroup._create_internal(rank, size)

    @staticmethod
    def create_default_device(lazy_init: bool) -> None: ...


def replace(owner: Any, **members: object) -> None:
    for name, member in members.items():
        setattr(owner, name, member)


def noted(counts: "Counter[str]", name: str, result: Callable[..., object] = lambda *arguments: None) -> Any:
    """What stands for an operation: it counts its calls, and returns `result` of their arguments."""

    def call(*arguments: object, **options: object) -> object:
        counts[name] += 1
        return result(*arguments)

    replace(call, default=call)  # as an operator of torch has its overloads
    return call


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that takes every `device` for the host, and pins no memory."""

    def call(*arguments: object, device: object = None, pin_memory: bool = False, **options: object) -> Any:
        return function(*arguments, **options)

    return call


def moved_nowhere(to: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.to, for a tensor that is on the GPU already."""

    def call(tensor: torch.Tensor, *arguments: object, **options: object) -> Any:
        return tensor if GPU in (*arguments, *options.values()) else to(tensor, *arguments, **options)

    return call


class LaunchesOfTorch(TorchDispatchMode):
    """Counts, on this thread, the kernels of torch that `pretend_gpu` leaves alone; they run on the host.

    Raises:
        RuntimeError: an operation of torchbagua is among them.
    """

    # Of what is no view and launches nothing all the same.
    _ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view")

    def __init__(self, launches: "Counter[str]") -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.overloadpacket.__name__
        if func.namespace == "torchbagua":
            raise RuntimeError(f"torchbagua::{name} is called by a reference that is older than `pretend_gpu`'s")
        if not func.is_view and name not in self._ALLOCATING:
            self._launches[name] += 1
        return func(*args, **(kwargs or {}))
