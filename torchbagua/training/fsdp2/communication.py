"""What communicates for a sharded module: its gradients, over its replicas too, and the weights that it gathers."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from torchbagua._description import describe
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.training.fsdp2.bounded import bound_gathers, bound_reduce_scatters, on_cpus, open_shards
from torchbagua.training.fsdp2.checks import check_even_nodes, shard_codecs
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.training.fsdp2.gather import install_weight_gathers
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.reduce_scatter import install_reduce_scatters
from torchbagua.training.fsdp2.replicas import install_replica_means, open_replicas, share_shards
from torchbagua.training.fsdp2.rows import communicating_parts


def install_communication(
    impl: AlgorithmImpl,
    module: torch.nn.Module,
    parts: Mapping[str, Any],
    sharding: Sharding,
    must_agree: Mapping[str, Any],
) -> ExitStack:
    """Have `impl` communicate for a module until what is returned is closed. Collective with replicas.

    Replicas first get the parameters and buffers of the first.

    Args:
        impl: over the ranks among which the module is sharded.
        module: all of it.
        parts: those on which fully_shard was called, by name.
        sharding: the ranks that hold the same shards, and how weights are gathered.
        must_agree: what must be the same on all of these ranks, by name.

    Raises:
        ValueError, TimeoutError, CommunicationError: see `check_even_nodes`, `open_replicas`.
    """
    codecs = shard_codecs("attach", impl.algorithm)
    communicating = communicating_parts(module, parts)
    with ExitStack() as undo:  # closed here only where one of these steps raises
        runner = FsdpCommRunner(impl)
        if sharding.replicate_group is not None:
            algorithm = describe(impl.algorithm, type(impl.algorithm).__name__)
            must_agree = {"the algorithm": algorithm, **must_agree}
            replicas = undo.enter_context(open_replicas(impl, sharding.replicate_group, must_agree))
            share_shards(replicas, module)
            runner = FsdpCommRunner(impl, replicas)
            undo.enter_context(install_replica_means(runner, communicating, codecs))
        undo.enter_context(bound_gathers(runner.group, runner.failure, communicating))
        check_even_nodes(impl.algorithm, codecs, runner.group.node_ranks)
        undo.enter_context(install_reduce_scatters(runner, communicating, codecs))
        undo.enter_context(bound_reduce_scatters(runner.group, runner.failure, communicating))
        if (codec := sharding.quantize_weights) is not None:
            hierarchical = codecs.hierarchical
            undo.enter_context(install_weight_gathers(runner, communicating, codec, hierarchical=hierarchical))
        return undo.pop_all()


def bound_waits(impl: AlgorithmImpl, module: torch.nn.Module, parts: Mapping[str, Any]) -> ExitStack:
    """Bound what FSDP waits for by the timeout of `impl`, which averages weights, until what is returned is closed.

    Collective among the ranks that share a copy of the module.

    Args:
        impl: over the ranks that hold the same shards.
        module: all of it.
        parts: those on which fully_shard was called, by name.

    Raises:
        TimeoutError, CommunicationError: see `BaguaProcessGroup`.
    """
    communicating = communicating_parts(module, parts)
    with ExitStack() as undo:  # closed here only where one of these steps raises
        shards = undo.enter_context(open_shards(impl, communicating))  # on GPUs too: a rank may have refused to attach
        failure = FirstFailure([shards, impl.process_group])
        undo.enter_context(bound_gathers(shards, failure, on_cpus(communicating)))
        undo.enter_context(bound_reduce_scatters(shards, failure, on_cpus(communicating)))
        return undo.pop_all()
