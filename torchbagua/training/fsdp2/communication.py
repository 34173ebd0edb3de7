"""The communication of a sharded module: its gradients, over its replicas too, and the weights that it gathers."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from torchbagua._description import describe
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


def install_communication(
    undo: ExitStack,
    runner: Runner,
    module: torch.nn.Module,
    parts: Mapping[str, Any],
    sharding: Sharding,
    must_agree: Mapping[str, Any],
) -> None:
    """Have `runner` communicate for a module until `undo` is closed. Collective.

    Replicas first get the parameters and buffers of the first.

    Args:
        undo: takes what gives the parts back to torch, step by step.
        runner: over the ranks among which the module is sharded.
        module: all of it.
        parts: those on which fully_shard was called, by name.
        sharding: the ranks that hold the same shards, and how weights are gathered.
        must_agree: what must be the same on all of these ranks, by name.

    Raises:
        ValueError, TimeoutError, CommunicationError: see `check_even_nodes`, `open_replicas`.
    """
    codecs = shard_codecs("attach", runner.algorithm)
    communicating = communicating_parts(module, parts)
    for part in communicating:
        runner.use_device(part.param_group.device)
    fsdp_runner = FsdpCommRunner(runner)
    if sharding.replicate_group is not None:
        algorithm = describe(runner.algorithm, type(runner.algorithm).__name__)
        must_agree = {"the algorithm": algorithm, **must_agree}
        replicas = undo.enter_context(open_replicas(runner, sharding.replicate_group, must_agree))
        share_shards(replicas, module)
        fsdp_runner = FsdpCommRunner(runner, replicas)
        install_replica_means(undo, fsdp_runner, communicating, codecs)
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus)
    check_even_nodes(runner.algorithm, codecs, fsdp_runner.group.node_ranks)
    install_reduce_scatters(undo, fsdp_runner, communicating, codecs)
    bound_reduce_scatters(undo, fsdp_runner.group, fsdp_runner.failure, between_cpus)
    if sharding.quantize_weights is not None:
        codec = by_name(sharding.quantize_weights)
        install_weight_gathers(undo, fsdp_runner, communicating, codec, hierarchical=codecs.hierarchical)


def bound_waits(undo: ExitStack, runner: Runner, module: torch.nn.Module, parts: Mapping[str, Any]) -> None:
    """Bound what FSDP waits for by the timeout of `runner`, which averages weights, until `undo` is closed.

    Collective among the ranks that share a copy of the module.

    Args:
        undo: takes what gives the parts back to torch, step by step.
        runner: over the ranks that hold the same shards.
        module: all of it.
        parts: those on which fully_shard was called, by name.

    Raises:
        ValueError, TimeoutError, CommunicationError: see `open_shards`.
    """
    communicating = communicating_parts(module, parts)
    shards = undo.enter_context(open_shards(runner, communicating))  # on GPUs too: a rank may have refused to attach
    failure = FirstFailure([shards, runner.process_group])
    between_cpus = on_cpus(communicating)
    bound_gathers(undo, shards, failure, between_cpus)
    bound_reduce_scatters(undo, shards, failure, between_cpus)
