"""Simulates a GPU and NCCL that do nothing, so that the host's work for them can be counted and timed.

Every tensor reports the first GPU as its device, while its memory is the host's. Kernels of torchbagua, writes to
tensors, and NCCL calls are recorded and not executed, so that the contents of tensors mean nothing. Use it only in a
separate process: it cannot be undone.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it, which fails once a GPU is simulated
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
    """A process group of torch, and its backend, that sends nothing.

    Attributes:
        calls: the number of calls, by the name of the method.
    """

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: Counter[str] = Counter()
        self.options = SimpleNamespace(_timeout=timedelta(seconds=60))
        self._store = store
        for name in COLLECTIVES:
            setattr(self, name, make_counter(self.calls, name))

    @property
    def _device_types(self) -> list[torch.device]:
        return [GPU]

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> "PretendedNccl":
        return self


class PretendedStream:
    """A stream, and every event in it: all work is always complete."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def record_event(self, *arguments: object) -> "PretendedStream":
        return self

    record = wait = wait_event = wait_stream = synchronize = record_event

    def query(self) -> bool:
        return True


class HostFuture(torch.futures.Future[Any]):
    """A future without the events that it would record on a GPU."""

    def __new__(cls, *, devices: object = None) -> "HostFuture":
        return super().__new__(cls)

    def __init__(self, *, devices: object = None) -> None:
        super().__init__()


def pretend_gpu() -> "Counter[str]":
    """Simulate a GPU and NCCL from now on; return a counter of launched kernels, by name.

    Call it after `torchbagua.native.load()`, which loads the host's operations.
    """
    launches: Counter[str] = Counter()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operation = name.partition("::")
        if space == "torchbagua":
            replace(torch.ops.torchbagua, **{operation: make_counter(launches, operation)})
    replace(torch, **{name: ignore_device(getattr(torch, name)) for name in ALLOCATIONS})
    replace(torch.Tensor, **{name: make_counter(launches, name, lambda written, *rest: written) for name in WRITES})
    replace(
        torch.Tensor,
        is_cuda=True,
        device=property(lambda tensor: GPU),
        to=ignore_gpu(torch.Tensor.to),
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
        # The gloo groups that ranks open in addition to NCCL would connect the ranks.
        ProcessGroupGloo=PretendedGloo,
    )
    return launches


class PretendedGloo:
    """Replaces `torch.distributed.ProcessGroupGloo`."""

    _Options = SimpleNamespace

    def __new__(cls, store: dist.Store, rank: int, size: int, options: object) -> Any:
        return FakeProcessGroup._create_internal(rank, size)

    @staticmethod
    def create_default_device(lazy_init: bool) -> None: ...


def replace(owner: Any, **members: object) -> None:
    for name, member in members.items():
        setattr(owner, name, member)


def make_counter(counts: "Counter[str]", name: str, result: Callable[..., object] = lambda *arguments: None) -> Any:
    """Return a replacement for an operation that counts its calls and returns `result` of their arguments."""

    def call(*arguments: object, **options: object) -> object:
        counts[name] += 1
        return result(*arguments)

    replace(call, default=call)  # operators of torch have overloads as attributes
    return call


def ignore_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that allocates on the host for every `device`, and pins no memory."""

    def call(*arguments: object, device: object = None, pin_memory: bool = False, **options: object) -> Any:
        return function(*arguments, **options)

    return call


def ignore_gpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tensor.to for tensors that are already on the GPU."""

    def call(tensor: torch.Tensor, *arguments: object, **options: object) -> Any:
        return tensor if GPU in (*arguments, *options.values()) else to(tensor, *arguments, **options)

    return call


class LaunchesOfTorch(TorchDispatchMode):
    """Counts, on this thread, the kernels of torch that `pretend_gpu` does not replace; they run on the host.

    Raises:
        RuntimeError: one of them is an operation of torchbagua.
    """

    # Operations that are not views and still launch nothing.
    _ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view")

    def __init__(self, launches: "Counter[str]") -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.overloadpacket.__name__
        if func.namespace == "torchbagua":
            raise RuntimeError(f"torchbagua::{name} was called through a reference from before `pretend_gpu`")
        if not func.is_view and name not in self._ALLOCATING:
            self._launches[name] += 1
        return func(*args, **(kwargs or {}))
