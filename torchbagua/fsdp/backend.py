"""A torch process group that averages the replicas of native HSDP: its all-reduce is that of a gradient algorithm."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import COLLECTIVES_WITH_GIL, add_backends, fsdp_all_reduces, work_of
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.mean_codecs import MeanCodecs
from torchbagua.training.fsdp2.comm_runner import FsdpCommRunner
from torchbagua.training.fsdp2.replicas import mean_of_rows
from torchbagua.training.fsdp2.rows import CommunicatingPart
from torchbagua.transport.private_groups import default_backends


class ReplicaGroup(dist.ProcessGroup):
    """A group of ranks that hold the same shards. It compresses sums and means of flat floating-point tensors.

    Torch's own backends do everything else. FSDP calls its all-reduce in `foreach_reduce`, in which only the group can
    be replaced.

    Args:
        algorithm: has ranks compare it, and opens private groups.
        codecs: of the mean that takes the place of an all-reduce.
        store, rank, size, timeout: what torch gives the maker of a backend. Collective.
    """

    def __init__(
        self, algorithm: Algorithm, codecs: MeanCodecs, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one constructor that Python may override
        backends = default_backends(store, rank, size, timeout)
        # The algorithm gets a group of its own, whose all-reduce is not this one.
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            add_backends(group, backends)
        runner = algorithm.reify(self._inner, timeout=timeout)
        self._runner = FsdpCommRunner(runner)
        self._mean_of = cache(partial(mean_of_rows, self._runner.group, codecs))
        self._announced: CommunicatingPart | None = None
        self._has_warned = False

    def announce(self, part: CommunicatingPart) -> None:
        """Take note of what is all-reduced next: the gradients of `part`."""
        self._announced = part

    def allreduce(self, *arguments: Any, **named: Any) -> Any:
        """Replace the tensors by their sum or mean over the ranks, and return torch's handle of that.

        Raises:
            CommunicationError: a rank is gone or did not take part in time.
        """
        if not is_compressed(*arguments, **named):
            return self._inner.allreduce(*arguments, **named)
        (x_L,), options = arguments
        row = TensorSpec((x_L.numel(),), x_L.dtype, x_L.device, "an all-reduce")
        if self._announced is not None:
            row = self._announced.row(x_L.numel()).spec(x_L, self._announced.name)
            self._announced = None
        elif not self._has_warned:
            self._has_warned = True
            warn_user(
                f"torchbagua: an all-reduce of {x_L.numel():,} elements is compressed in blocks that end at no "
                "parameter's end: if it is FSDP's, call torchbagua.fsdp.align_blocks(module) after fully_shard; if it "
                "is yours, use another group to have it exact"
            )
        self._runner.algorithm_runner.use_device(x_L.device)
        mean = self._mean_of(row, average=options.reduceOp == dist.ReduceOp.AVG)
        self._runner.run(self._runner.group, row.name, x_L, partial(mean, x_L))
        future: torch.futures.Future[Any] = torch.futures.Future(devices=None if x_L.is_cpu else [x_L.device])
        future.set_result([x_L])
        return work_of(future)

    def shutdown(self) -> None:
        """End the private groups; `destroy_process_group` calls it, on all ranks."""
        self._runner.algorithm_runner.ends_in_order = True
        self._runner.algorithm_runner.close()
        super().shutdown()


def _inner_collective(name: str) -> Callable[..., Any]:
    def start(group: ReplicaGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(group._inner, name)(*arguments, **named)

    return start


for _name in {*COLLECTIVES_WITH_GIL} - {*vars(ReplicaGroup)}:
    setattr(ReplicaGroup, _name, _inner_collective(_name))


def is_compressed(tensors: Any, options: Any = None, **named: Any) -> bool:
    """Return whether an all-reduce with these arguments is the sum or the mean of one flat floating-point tensor."""
    if named or not isinstance(options, dist.AllreduceOptions) or not isinstance(tensors, list) or len(tensors) != 1:
        return False
    (x,) = tensors
    is_flat = x.layout is torch.strided and x.dim() == 1 and x.is_contiguous() and x.is_floating_point()
    operation: Any = options.reduceOp
    return is_flat and (operation == dist.ReduceOp.SUM or operation == dist.ReduceOp.AVG)


class Announcer:
    """The reduce-scatter that a part had, which tells the group of its replicas what is all-reduced after it.

    It does so where memory is allocated: with one shard FSDP calls the reduce-scatter itself not at all.

    Args:
        comm: the reduce-scatter.
        part: whose gradients it gets.
        group: over which they are all-reduced.
    """

    def __init__(self, comm: Any, part: CommunicatingPart, group: ReplicaGroup) -> None:
        self._comm = comm
        self._part = part
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output."""
        if fsdp_all_reduces(self._part.param_group):
            self._group.announce(self._part)
        memory: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, **arguments: Any) -> Any:
        """Reduce-scatter; FSDP gives the arguments by name."""
        return self._comm(**arguments)
