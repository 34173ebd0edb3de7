"""Installs the communication of a sharded module: of its gradients, over replicas too, and of gathered weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchbagua._torch import fsdp_shard_group
from torchbagua.codecs.base import by_name
from torchbagua.collectives.agreement import stable_repr
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.runner import Runner
from torchbagua.training.fsdp2.checks import check_even_nodes, shard_codecs
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.training.fsdp2.gathers import bound_gathers, quantize_gathers
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.parts import CommunicatingPart, communicating_parts
from torchbagua.training.fsdp2.reduce_scatters import bound_reduce_scatters, install_reduce_scatters
from torchbagua.training.fsdp2.same_rows import SameRows


def install_communication(
    undo: ExitStack,
    runner: Runner,
    module: torch.nn.Module,
    parts: Mapping[str, Any],
    given: Sharding | None,
    rank_invariants: Mapping[str, Any],
) -> None:
    """Have `runner`, of a gradient algorithm, communicate for a module until `undo` is closed. Collective.

    All replicas first get the parameters and buffers of the first replica.
    """
    sharding = given or Sharding()
    codecs = shard_codecs("attach", runner.algorithm)
    communicating = communicating_parts(module, parts)
    for part in communicating:
        runner.use_device(part.param_group.device)
        undo.enter_context(part.watch_gradients())
    fsdp_runner, replica_rows = FsdpCommRunner(runner), None
    if sharding.replicate_group is not None:
        from torchbagua.training.fsdp2.replicas import install_replica_means, open_replicas, share_shards

        algorithm = stable_repr(runner.algorithm, type(runner.algorithm).__name__)
        rank_invariants = {"the algorithm": algorithm, **rank_invariants}
        replicas = undo.enter_context(open_replicas(runner, sharding.replicate_group, rank_invariants))
        share_shards(replicas, module)
        fsdp_runner = FsdpCommRunner(runner, replicas)
        replica_rows = install_replica_means(undo, fsdp_runner, replicas, communicating, codecs)
    group, failure = fsdp_runner.group, fsdp_runner.failure
    between_cpus = _between_cpus(group, communicating)
    bound_gathers(undo, group, failure, between_cpus)
    check_even_nodes(runner.algorithm, codecs, group.node_ranks)
    same_rows = fsdp_runner.compare_rows(group, communicating, replica_rows)
    install_reduce_scatters(undo, fsdp_runner, communicating, codecs, same_rows)
    bound_reduce_scatters(undo, group, failure, between_cpus, same_rows)
    if sharding.quantize_weights is not None:
        codec = by_name(sharding.quantize_weights)
        quantize_gathers(undo, fsdp_runner, communicating, codec, hierarchical=codecs.hierarchical)


def bound_waits(undo: ExitStack, runner: Runner, module: torch.nn.Module, parts: Mapping[str, Any]) -> None:
    """Bound FSDP's waits by the timeout of `runner`, of a weight algorithm, until `undo` is closed.

    Collective among the ranks that share a copy of the module.
    """
    communicating = communicating_parts(module, parts)
    shards = undo.enter_context(_open_shards(runner, communicating))  # on GPUs too: a rank may have refused to attach
    between_cpus = _between_cpus(shards, communicating)
    if between_cpus:
        failure = FirstFailure([shards, runner.process_group])
        bound_gathers(undo, shards, failure, between_cpus)
        for part in between_cpus:
            undo.enter_context(part.watch_gradients())
        bound_reduce_scatters(undo, shards, failure, between_cpus, SameRows(shards.world, communicating))


@contextmanager
def _open_shards(runner: Runner, parts: Sequence[CommunicatingPart]) -> Iterator[BaguaProcessGroup]:
    """Create a group of the ranks that share a copy of the module, for as long as the context lasts. Collective.

    Its private groups are open only if collectives run between CPUs.
    """
    group = fsdp_shard_group(parts[0].param_group)
    assert group is not None
    shards = BaguaProcessGroup(group, timeout=runner.process_group.timeout, transport=runner.process_group.transport)
    try:
        shards.report_to(runner.tracer, "shards")
        if _between_cpus(shards, parts):
            shards.open()
            shards.private.check_operations(torch.device("cpu"), runner.name)
        yield shards
    finally:
        shards.close()


def _between_cpus(group: BaguaProcessGroup, parts: Sequence[CommunicatingPart]) -> list[CommunicatingPart]:
    """Return the parts that communicate over `group` between CPUs."""
    return [part for part in parts if part.param_group.device.type == "cpu"] if group.size > 1 else []
