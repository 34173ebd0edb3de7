"""Replicas of shards (HSDP): after its reduce-scatter, FSDP calls a hook that averages a shard over its replicas."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_reduces, fsdp_divide_factor, fsdp_shards
from torchbagua._warnings import warn_user
from torchbagua.codecs.base import MeanCodecs, TensorSpec
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.mean import Mean, centralized_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.runner import Runner
from torchbagua.training.fsdp2.comm_runner import FsdpCommRunner
from torchbagua.training.fsdp2.parts import CommunicatingPart, Row
from torchbagua.training.fsdp2.same_rows import SameRows
from torchbagua.transport.streams import keep_for_current_stream


@contextmanager
def open_replicas(
    runner: Runner, group: dist.ProcessGroup, rank_invariants: Mapping[str, Any]
) -> Iterator[BaguaProcessGroup]:
    """Open private groups of the ranks that hold the same shards, for as long as the context lasts. Collective."""
    own = runner.process_group
    places = {"the rank that holds a shard, of those of its module": f"{own.rank} of {own.size}"}
    replicas = BaguaProcessGroup(
        group, timeout=own.timeout, transport=own.transport, rank_invariants={**rank_invariants, **places}
    )
    try:
        replicas.open()
        replicas.report_to(own.tracer, "replicas")
        replicas.private.check_operations(torch.device("cpu"), runner.name)  # with GPUs too, since shards are broadcast
        yield replicas
    finally:
        if runner.ends_in_order and not runner.lane.has_failed:
            replicas.private.end_in_order()
        replicas.close()


def share_shards(replicas: BaguaProcessGroup, module: torch.nn.Module) -> None:
    """Give all replicas the parameters and buffers of the first, which fully_shard does not do. Collective."""
    broadcast_tensors(replicas.world, map(local_shard, (*module.parameters(), *module.buffers())), "the shards")


def install_replica_means(
    undo: ExitStack,
    runner: FsdpCommRunner,
    replicas: BaguaProcessGroup,
    parts: Sequence[CommunicatingPart],
    codecs: MeanCodecs,
) -> SameRows:
    """Average the gradients of all parts over the replicas until `undo` is closed. Collective on GPUs."""
    for device in dict.fromkeys(part.param_group.device for part in parts):
        if device.type != "cpu":
            replicas.private.use_device(device)
            replicas.private.check_operations(device, runner.algorithm_runner.name)
    same_rows = runner.compare_rows(replicas, parts)
    for part in parts:
        mean = ReplicaMean(runner, replicas, part, codecs, same_rows)
        undo.callback(part.part.set_all_reduce_hook, None)
        undo.callback(mean.close)
        part.part.set_all_reduce_hook(mean)
    return same_rows


def mean_of_rows(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, *, average: bool) -> Mean:
    """Return the function that replaces a row by its mean over `group`, or by its sum without `average`."""
    codecs = codecs.for_dtype(row.dtype)
    hierarchical, intra = codecs.hierarchical, codecs.intra_codec
    return centralized_mean(
        group, codecs.codec, row, hierarchical=hierarchical, average=average, intra_compressor=intra
    )


class ReplicaMean:
    """The all-reduce hook of one FSDP parameter group: averages the reduce-scattered gradients over the replicas.

    FSDP also calls the hook with `set_requires_all_reduce(False)`, and adds the hook's output to the gradient. The hook
    then stores its input for the next mean, and returns zeros. If the loop discards the gradients with `zero_grad()`,
    the hook discards its stored input too.
    """

    def __init__(
        self,
        runner: FsdpCommRunner,
        replicas: BaguaProcessGroup,
        part: CommunicatingPart,
        codecs: MeanCodecs,
        same_rows: SameRows,
    ) -> None:
        self._runner = runner
        self._replicas = replicas
        self._part = part
        self._same_rows = same_rows
        self._mean_of = cache(partial(mean_of_rows, replicas, codecs))
        self._stored: tuple[Row, torch.Tensor] | None = None

    def __call__(self, gradient_L: torch.Tensor) -> None:
        """Replace the local shard of the gradient by its mean over the replicas, on the current stream.

        If the part has a gradient divide factor, it is replaced by the sum, since FSDP divides by that factor.
        """
        # Up to torch 2.14 nothing keeps this tensor alive until this stream is done with it. If FSDP casts it
        # afterwards, the next layer's reduce-scatter, on another stream, could get its memory.
        keep_for_current_stream(gradient_L)
        row = self._part.row(gradient_L.numel())
        stored, self._stored = self._stored, None
        if all(parameter.grad is None for parameter, _ in fsdp_shards(self._part.param_group)):
            stored = None
        if stored is not None and stored[0] != row:
            raise RuntimeError(
                f"torchbagua: {self._part.name}: with set_requires_all_reduce(False) every backward must reach the "
                f"same parameters, got {', '.join(row.parameter_names)} after {', '.join(stored[0].parameter_names)}; "
                "call set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        if not fsdp_all_reduces(self._part.param_group):
            self._stored = row, gradient_L.clone() if stored is None else stored[1].add_(gradient_L)
            gradient_L.zero_()
            return
        if stored is not None:
            gradient_L.add_(stored[1])
            stored = None  # frees its memory before the mean is computed
        average = fsdp_divide_factor(self._part.param_group) is None
        mean = self._mean_of(row.spec(gradient_L, self._part.name), average=average)
        reduce_row = partial(self._same_rows.reduce, self._part, row, mean, gradient_L)
        self._runner.run(self._replicas, self._part.name, gradient_L, reduce_row)

    def close(self) -> None:
        """Discard gradients that were stored but never averaged, with a warning, since they are in no gradient."""
        if self._stored is not None:
            self._stored = None
            warn_user(
                f"torchbagua: {self._part.name}: the gradients accumulated with set_requires_all_reduce(False) are "
                "lost: detach was called before a backward that averages them"
            )
