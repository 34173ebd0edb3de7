"""Replicas of shards (HSDP): after its reduce-scatter, FSDP has a hook form the mean of a shard over its replicas."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduces, fsdp_divide_factor, fsdp_shards
from torchbagua._warnings import warn_user
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.shards import local_shard
from torchbagua.training.fsdp2.rows import CommunicatingPart, Row, RowAllReduce, RowRunner


@contextmanager
def open_replicas(
    impl: AlgorithmImpl, group: dist.ProcessGroup, must_agree: Mapping[str, Any]
) -> Iterator[BaguaProcessGroup]:
    """Open private groups of the ranks that hold the same shards, for as long as the context lasts. Collective.

    Args:
        impl: over the ranks among which the module is sharded; its observers hear of these groups too.
        group: the replicas.
        must_agree: what must be the same on all of them, by the name that an error gives it.

    Raises:
        ValueError: they differ in that, or in their places among the ranks of a module.
        TimeoutError, CommunicationError: see `BaguaProcessGroup`.
    """
    own = impl.process_group
    places = {"the rank that holds a shard, of those of its module": f"{own.rank} of {own.size}"}
    replicas = BaguaProcessGroup(group, timeout=own.timeout, must_agree={**must_agree, **places})
    try:
        replicas.open()
        replicas.tell_through(own.tracer, "replicas")
        yield replicas
    finally:
        if impl.ends_in_order and not impl.lane.has_failed:
            replicas.end_in_order()
        replicas.close()


def share_shards(replicas: BaguaProcessGroup, module: torch.nn.Module) -> None:
    """Give all replicas the parameters and buffers of the first. Collective: fully_shard leaves them as they are."""
    broadcast_tensors(replicas.world, map(local_shard, (*module.parameters(), *module.buffers())), "the shards")


def averaged_by(runner: RowRunner, parts: Sequence[CommunicatingPart]) -> ExitStack:
    """Have the gradients of all parts averaged over the replicas, until what is returned is closed."""
    with ExitStack() as undo:  # closed here only where one of these steps raises
        for one in parts:
            mean = ReplicaMean(runner, one)
            undo.callback(one.part.set_all_reduce_hook, None)
            undo.callback(mean.close)
            one.part.set_all_reduce_hook(mean)
        return undo.pop_all()


class ReplicaMean:
    """The all-reduce hook of one FSDP parameter group: the mean of what it reduce-scatters, over the replicas.

    FSDP calls it under `set_requires_all_reduce(False)` too, and adds what it leaves to the gradient. There it keeps
    its input for the next mean, and leaves zeros. Where the loop has thrown these away, with `zero_grad()`, so does it.

    Args:
        runner: whose impl's codecs are used, with replicas.
        part: whose gradients they are.
    """

    def __init__(self, runner: RowRunner, part: CommunicatingPart) -> None:
        assert runner.replicas is not None
        self._runner = runner
        self._replicas = runner.replicas
        self._part = part
        self._all_reduce = RowAllReduce(runner.impl.algorithm, runner.replicas)
        self._kept_L: torch.Tensor | None = None
        self._kept_row: Row = ()

    def __call__(self, gradient_L: torch.Tensor) -> None:
        """Replace own shard of the gradient by its mean over the replicas, on the current stream.

        It becomes their sum where the part has a gradient divide factor, which then is what all is divided by.

        Raises:
            RuntimeError: other parameters had a gradient in a backward before, of which the mean is still to come.
            CommunicationError: a replica is gone or did not take part in time.
        """
        if gradient_L.is_cuda:
            # Up to torch 2.14 nobody holds it until this stream is done with it, and where FSDP casts it afterwards the
            # next layer's reduce-scatter, on another stream, would be given its memory.
            gradient_L.record_stream(torch.cuda.current_stream(gradient_L.device))
        row = self._part.row(gradient_L.numel())
        if self._kept_L is not None and all(one.grad is None for one, _ in fsdp_shards(self._part.param_group)):
            self._kept_L = None
        if self._kept_L is not None and self._kept_row != row:
            self._kept_L = None
            raise RuntimeError(
                f"torchbagua: {self._part.name}: under set_requires_all_reduce(False) every backward must reach the "
                f"same parameters, got {_names_of(row)} after {_names_of(self._kept_row)}; call "
                "set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        if not fsdp_all_reduces(self._part.param_group):
            self._kept_L = gradient_L.clone() if self._kept_L is None else self._kept_L.add_(gradient_L)
            self._kept_row = row
            gradient_L.zero_()
            return
        if self._kept_L is not None:
            gradient_L.add_(self._kept_L)
            self._kept_L = None
        self._runner.impl.use_device(gradient_L.device)
        self._replicas.use_device(gradient_L.device)
        average = fsdp_divide_factor(self._part.param_group) is None
        mean = self._all_reduce.mean(row, gradient_L, self._part.name, average=average)
        self._runner.run(self._replicas, self._part.name, gradient_L, lambda: mean(gradient_L))

    def close(self) -> None:
        """Let go what no mean has taken up; it is in no gradient, so say so."""
        if self._kept_L is not None:
            self._kept_L = None
            warn_user(
                f"torchbagua: {self._part.name}: what was accumulated under set_requires_all_reduce(False) is lost: "
                "detach comes before a backward that averages it"
            )


def _names_of(row: Row) -> str:
    return ", ".join(name for name, _ in row)
