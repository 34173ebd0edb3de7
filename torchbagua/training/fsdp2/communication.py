"""Installs the communication of a sharded module: of its gradients, over replicas too, and of gathered weights."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from torchbagua._stable_repr import stable_repr
from torchbagua.codecs.lookup import by_name
from torchbagua.runtime.runner import Runner
from torchbagua.training.fsdp2.bounded import bound_gathers, bound_reduce_scatters, on_cpus, open_shards
from torchbagua.training.fsdp2.checks import check_even_nodes, shard_codecs
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.training.fsdp2.gather import install_weight_gathers
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.reduce_scatter import install_reduce_scatters
from torchbagua.training.fsdp2.replicas import install_replica_means, open_replicas, share_shards
from torchbagua.training.fsdp2.rows import communicating_parts
from torchbagua.training.fsdp2.same_rows import SameRows


def install_communication(
    undo: ExitStack,
    runner: Runner,
    module: torch.nn.Module,
    parts: Mapping[str, Any],
    sharding: Sharding,
    rank_invariants: Mapping[str, Any],
) -> None:
    """Have `runner` communicate for a module until `undo` is closed. Collective.

    All replicas first get the parameters and buffers of the first replica.

    Args:
        undo: receives the callbacks that restore torch's communication.
        runner: over the ranks among which the module is sharded.
        module: the whole module.
        parts: the parts on which fully_shard was called, by name.
        sharding: the ranks that hold the same shards, and how weights are gathered.
        rank_invariants: the settings that must be the same on all of these ranks, by name.

    Raises:
        ValueError, TimeoutError, CommunicationError: see `check_even_nodes`, `open_replicas`.
    """
    codecs = shard_codecs("attach", runner.algorithm)
    communicating = communicating_parts(module, parts)
    for part in communicating:
        runner.use_device(part.param_group.device)
        undo.enter_context(part.watch_gradients())
    fsdp_runner = FsdpCommRunner(runner)
    if sharding.replicate_group is not None:
        algorithm = stable_repr(runner.algorithm, type(runner.algorithm).__name__)
        rank_invariants = {"the algorithm": algorithm, **rank_invariants}
        replicas = undo.enter_context(open_replicas(runner, sharding.replicate_group, rank_invariants))
        share_shards(replicas, module)
        fsdp_runner = FsdpCommRunner(runner, replicas)
        install_replica_means(undo, fsdp_runner, communicating, codecs)
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus)
    check_even_nodes(runner.algorithm, codecs, fsdp_runner.group.node_ranks)
    same_rows = fsdp_runner.compare_rows(communicating)
    install_reduce_scatters(undo, fsdp_runner, communicating, codecs, same_rows)
    bound_reduce_scatters(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus, same_rows)
    if sharding.quantize_weights is not None:
        codec = by_name(sharding.quantize_weights)
        install_weight_gathers(undo, fsdp_runner, communicating, codec, hierarchical=codecs.hierarchical)


def bound_waits(undo: ExitStack, runner: Runner, module: torch.nn.Module, parts: Mapping[str, Any]) -> None:
    """Bound FSDP's waits by the timeout of `runner`, of a weight algorithm, until `undo` is closed.

    Collective among the ranks that share a copy of the module.

    Args:
        undo: receives the callbacks that restore torch's communication.
        runner: over the ranks that hold the same shards.
        module: the whole module.
        parts: the parts on which fully_shard was called, by name.

    Raises:
        ValueError, TimeoutError, CommunicationError: see `open_shards`.
    """
    communicating = communicating_parts(module, parts)
    shards = undo.enter_context(open_shards(runner, communicating))  # on GPUs too: a rank may have refused to attach
    failure = FirstFailure([shards, runner.process_group])
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, shards, failure, between_cpus)
    for part in between_cpus:
        undo.enter_context(part.watch_gradients())
    if between_cpus:
        bound_reduce_scatters(undo, shards, failure, between_cpus, SameRows(shards.world, communicating))
