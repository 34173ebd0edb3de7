"""Replicas of shards (HSDP): after its reduce-scatter, FSDP has a hook form the mean of a shard over its replicas."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduces, fsdp_divide_factor, fsdp_shards
from torchbagua._warnings import warn_user
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.mean_codecs import MeanCodecs
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.centralized_mean import Mean, centralized_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.shards import local_shard
from torchbagua.training.fsdp2.comm_runner import FsdpCommRunner
from torchbagua.training.fsdp2.rows import CommunicatingPart, Row
from torchbagua.transport.streams import keep_for_current_stream


@contextmanager
def open_replicas(
    runner: Runner, group: dist.ProcessGroup, must_agree: Mapping[str, Any]
) -> Iterator[BaguaProcessGroup]:
    """Open private groups of the ranks that hold the same shards, for as long as the context lasts. Collective.

    Args:
        runner: over the ranks among which the module is sharded; its observers hear of these groups too.
        group: the replicas.
        must_agree: what must be the same on all of them, by the name that an error gives it.

    Raises:
        ValueError: they differ in that, or in their places among the ranks of a module, or a backend lacks an
            operation; see `BaguaProcessGroup.check_operations`.
        TimeoutError, CommunicationError: see `BaguaProcessGroup`.
    """
    own = runner.process_group
    places = {"the rank that holds a shard, of those of its module": f"{own.rank} of {own.size}"}
    replicas = BaguaProcessGroup(
        group, timeout=own.timeout, transport=own.transport, must_agree={**must_agree, **places}
    )
    try:
        replicas.open()
        replicas.tell_through(own.tracer, "replicas")
        replicas.check_operations(torch.device("cpu"), runner.name)  # also of GPUs: shards are shared
        yield replicas
    finally:
        if runner.ends_in_order and not runner.lane.has_failed:
            replicas.end_in_order()
        replicas.close()


def share_shards(replicas: BaguaProcessGroup, module: torch.nn.Module) -> None:
    """Give all replicas the parameters and buffers of the first. Collective: fully_shard leaves them as they are."""
    broadcast_tensors(replicas.world, map(local_shard, (*module.parameters(), *module.buffers())), "the shards")


def install_replica_means(
    undo: ExitStack, runner: FsdpCommRunner, parts: Sequence[CommunicatingPart], codecs: MeanCodecs
) -> None:
    """Average the gradients of all parts over the replicas with `codecs`, until `undo` is closed. Collective on GPUs.

    Raises:
        ValueError, CommunicationError: see `BaguaProcessGroup.use_device` and `check_operations`.
    """
    assert runner.replicas is not None
    for device in dict.fromkeys(part.param_group.device for part in parts):
        if device.type != "cpu":
            runner.replicas.use_device(device)
            runner.replicas.check_operations(device, runner.algorithm_runner.name)
    for part in parts:
        mean = ReplicaMean(runner, part, codecs)
        undo.callback(part.part.set_all_reduce_hook, None)
        undo.callback(mean.close)
        part.part.set_all_reduce_hook(mean)


def mean_of_rows(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, *, average: bool) -> Mean:
    """Return the function that replaces a row by its mean over `group`, or by its sum."""
    codecs = codecs.for_dtype(row.dtype)
    return centralized_mean(
        group,
        codecs.codec,
        row,
        hierarchical=codecs.hierarchical,
        average=average,
        intra_compressor=codecs.intra_codec,
    )


class ReplicaMean:
    """The all-reduce hook of one FSDP parameter group: the mean of what it reduce-scatters, over the replicas.

    FSDP calls it under `set_requires_all_reduce(False)` too, and adds what it leaves to the gradient. There it keeps
    its input for the next mean, and leaves zeros. Where the loop has thrown these away, with `zero_grad()`, so does it.

    Args:
        runner: one with replicas.
        part: whose gradients they are.
        codecs: of the mean.
    """

    def __init__(self, runner: FsdpCommRunner, part: CommunicatingPart, codecs: MeanCodecs) -> None:
        assert runner.replicas is not None
        self._runner = runner
        self._replicas = runner.replicas
        self._part = part
        self._mean_of = cache(partial(mean_of_rows, runner.replicas, codecs))
        self._kept: tuple[Row, torch.Tensor] | None = None

    def __call__(self, gradient_L: torch.Tensor) -> None:
        """Replace the local shard of the gradient by its mean over the replicas, on the current stream.

        It becomes their sum where the part has a gradient divide factor, which then is what all is divided by.

        Raises:
            RuntimeError: other parameters had a gradient in a backward before, of which the mean is still to come.
            CommunicationError: a replica is gone or did not take part in time.
        """
        # Up to torch 2.14 nobody holds it until this stream is done with it, and if FSDP casts it afterwards the next
        # layer's reduce-scatter, on another stream, would be given its memory.
        keep_for_current_stream(gradient_L)
        row = self._part.row(gradient_L.numel())
        kept, self._kept = self._kept, None
        if all(parameter.grad is None for parameter, _ in fsdp_shards(self._part.param_group)):
            kept = None
        if kept is not None and kept[0] != row:
            raise RuntimeError(
                f"torchbagua: {self._part.name}: under set_requires_all_reduce(False) every backward must reach the "
                f"same parameters, got {', '.join(row.parameter_names)} after {', '.join(kept[0].parameter_names)}; "
                "call set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        if not fsdp_all_reduces(self._part.param_group):
            self._kept = row, gradient_L.clone() if kept is None else kept[1].add_(gradient_L)
            gradient_L.zero_()
            return
        if kept is not None:
            gradient_L.add_(kept[1])
            kept = None  # its memory is free while the mean is formed
        average = fsdp_divide_factor(self._part.param_group) is None
        mean = self._mean_of(row.spec(gradient_L, self._part.name), average=average)
        self._runner.run(self._replicas, self._part.name, gradient_L, partial(mean, gradient_L))

    def close(self) -> None:
        """Let go what no mean has taken up; it is in no gradient, so say so."""
        if self._kept is not None:
            self._kept = None
            warn_user(
                f"torchbagua: {self._part.name}: what was accumulated under set_requires_all_reduce(False) is lost: "
                "detach comes before a backward that averages it"
            )
