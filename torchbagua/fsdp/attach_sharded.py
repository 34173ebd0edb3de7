"""attach for modules that fully_shard has sharded (FSDP2): its arguments, its checks, and what it installs.

`torchbagua.attach` imports this module once it finds that fully_shard was called on a part of its module; it then has
a `Sharding` with default arguments, and `attach` of this module has one with two more arguments.

Execution order, within that of training/attach.py:

1. `Sharding.check` checks what can fail on one rank alone.
2. With a gradient algorithm, `Sharding.install_gradients` replaces the collectives of each parameter group that FSDP
   communicates, a `CommunicatingPart` (parts.py): all-gathers and reduce-scatters (collectives.py). With a
   `replicate_group`, it also installs a hook that averages over the replicas (replicas.py).
3. With a weight algorithm, `Sharding.bound_waits` only bounds the waits of FSDP's collectives between CPUs.
4. In backward, FSDP calls a reduce-scatter, which has the `FsdpCommRunner` (comm_runner.py) reduce a row of shards.
   Ranks compare which parameters' gradients it contains (same_rows.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.algorithms.base import Algorithm
from torchbagua.codecs.base import Compressor, by_name, check_compression, needs_feedback
from torchbagua.collectives.agreement import stable_repr
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.fsdp._torch import (
    fsdp_all_gather,
    fsdp_all_reduce_hook,
    fsdp_is_offloaded,
    fsdp_own_gathers,
    fsdp_param_groups,
    fsdp_reduce_scatter,
    fsdp_shard_group,
    fsdp_shards,
)
from torchbagua.fsdp.collectives import (
    algorithms_of_shards,
    bound_gathers,
    bound_reduce_scatters,
    install_reduce_scatters,
    quantize_gathers,
    shard_codecs,
    why_in_full_precision,
)
from torchbagua.fsdp.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.fsdp.parts import CommunicatingPart, check_parameters_inside, communicating_parts
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.observe.events import Observer
from torchbagua.runtime.runner import Runner
from torchbagua.training.attach import Attachment, install
from torchbagua.training.checks import TrainingSetup, check_arguments


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    replicate_group: dist.ProcessGroup | None = None,
    quantize_weights: str | Compressor | None = None,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> Attachment:
    """Attach an algorithm to a module on which fully_shard was called: `torchbagua.attach` with two more arguments.

    Collective among the ranks of all meshes.

    Args:
        module, optimizer, algorithm, process_group, grad_scaler, observers, timeout: see `torchbagua.attach`.
        replicate_group: the torch group of the ranks that hold the same shards as this rank, if several
            one-dimensional meshes train copies of the module. All ranks of this group first get the parameters and
            buffers of its first rank. A gradient algorithm then averages gradients over this group too. A weight
            algorithm needs this group, and averages each rank's shards over it.
        quantize_weights: the codec with which ranks gather the weights: its name, see `torchbagua.codecs`, or a
            Compressor that needs no error feedback. Forward and backward then compute with the decoded weights, which
            are the same on all ranks (qwZ of ZeRO++, Wang et al., arXiv 2306.10209). The optimizer keeps its shards in
            full precision. By default weights are gathered in full precision too.

    Raises:
        The errors of `torchbagua.attach`, and ValueError if one of the two arguments is given although fully_shard was
        called on no part of the module.
    """
    sharding = Sharding(replicate_group, quantize_weights)
    setup = check_arguments(module, optimizer, algorithm, process_group, grad_scaler, observers, timeout, sharding)
    return install(setup, process_group, observers, timeout)


@dataclass(frozen=True)
class Sharding:
    """FSDP2's part of an attachment: which ranks hold the same shards, and how weights are gathered; see `attach`."""

    replicate_group: dist.ProcessGroup | None = None
    quantize_weights: str | Compressor | None = None

    def __post_init__(self) -> None:
        if self.replicate_group is not None and not isinstance(self.replicate_group, dist.ProcessGroup):
            raise TypeError(
                "attach: replicate_group must be a torch.distributed.ProcessGroup of which this rank is a member, got "
                f"{type(self.replicate_group).__name__}"
            )
        codec = check_compression("attach: quantize_weights", self.quantize_weights)
        object.__setattr__(self, "quantize_weights", codec)
        if needs_feedback(codec):
            raise ValueError(
                "attach: quantize_weights must not be a codec that needs error feedback, since the residual of weights "
                f"is lost; got {codec!r}"
            )

    def check(self, setup: TrainingSetup) -> None:
        """Raise ValueError if the algorithm cannot be attached to the module with its sharded parts, possibly none."""
        module, parts, algorithm = setup.inner, setup.sharded_parts, setup.algorithm
        if not parts:
            self._refuse_arguments(module)
        elif algorithm.averages_weights:
            self._check_weight_averaging(algorithm)
        else:
            shard_codecs("attach", algorithm)
            check_parameters_inside(module, communicating_parts(module, parts))
            _check_reduce_scatters(parts)
            if self.replicate_group is not None:
                _check_all_reduce_hooks(parts)
            if self.quantize_weights is not None:
                _check_all_gathers(module, parts)

    def _refuse_arguments(self, module: torch.nn.Module) -> None:
        reason = f"since fully_shard was called on no part of {type(module).__name__}"
        if self.replicate_group is not None:
            raise ValueError(
                f"attach: replicate_group must be None {reason}; give the ranks that hold the whole module as "
                "process_group"
            )
        if self.quantize_weights is not None:
            raise ValueError(
                f"attach: quantize_weights must be None {reason}: its weights are not gathered; got "
                f"{self.quantize_weights!r}"
            )

    def _check_weight_averaging(self, algorithm: Algorithm) -> None:
        if self.replicate_group is None:
            raise ValueError(
                f"attach: {type(algorithm).__name__} averages weights over ranks that hold the same weights, but the "
                "module is sharded. If several meshes train copies of the module, give the ranks that hold the same "
                "shards as this rank: torchbagua.fsdp.attach(..., replicate_group=...). To compress gradients within "
                f"one mesh, attach {' or '.join(algorithms_of_shards())}"
            )
        if self.quantize_weights is not None:
            raise ValueError(
                f"attach: quantize_weights must be None with {type(algorithm).__name__}, which averages weights over "
                f"replicas and leaves the gathers of weights to torch; got {self.quantize_weights!r}"
            )

    def shard_group(self, setup: TrainingSetup) -> dist.ProcessGroup:
        """Return the ranks over which gradients are reduce-scattered. ValueError for several meshes."""
        return shard_group_of(setup.sharded_parts)

    def uncompressed_weights(self, setup: TrainingSetup) -> Iterator[str]:
        """Yield a message for each part whose weights are gathered in full precision despite `quantize_weights`."""
        if self.quantize_weights is not None:
            codec = by_name(self.quantize_weights)
            parts = communicating_parts(setup.inner, setup.sharded_parts)
            yield from filter(None, (why_in_full_precision(part, codec) for part in parts))

    def install_gradients(self, setup: TrainingSetup, runner: Runner, undo: ExitStack) -> None:
        """Have `runner`, of a gradient algorithm, communicate for a module until `undo` is closed. Collective.

        All replicas first get the parameters and buffers of the first replica.
        """
        codecs = shard_codecs("attach", runner.algorithm)
        parts = communicating_parts(setup.inner, setup.sharded_parts)
        for part in parts:
            runner.use_device(part.param_group.device)
            undo.enter_context(part.watch_gradients())
        fsdp_runner, replica_rows = FsdpCommRunner(runner), None
        if self.replicate_group is not None:
            from torchbagua.fsdp.replicas import install_replica_means, open_replicas, share_shards

            algorithm = stable_repr(runner.algorithm, type(runner.algorithm).__name__)
            rank_invariants = {"the algorithm": algorithm, **setup.rank_invariants()}
            replicas = undo.enter_context(open_replicas(runner, self.replicate_group, rank_invariants))
            share_shards(replicas, setup.inner)
            fsdp_runner = FsdpCommRunner(runner, replicas)
            replica_rows = install_replica_means(undo, fsdp_runner, replicas, parts, codecs)
        group, failure = fsdp_runner.group, fsdp_runner.failure
        between_cpus = _between_cpus(group, parts)
        bound_gathers(undo, group, failure, between_cpus)
        if codecs.hierarchical and len(set(map(len, group.node_ranks))) > 1:
            raise ValueError(
                f"attach: {type(runner.algorithm).__name__}: hierarchical must be False for sharded modules if nodes "
                f"have different numbers of ranks, got {group.node_ranks}"
            )
        same_rows = fsdp_runner.compare_rows(group, parts, replica_rows)
        install_reduce_scatters(undo, fsdp_runner, parts, codecs, same_rows)
        bound_reduce_scatters(undo, group, failure, between_cpus, same_rows)
        if self.quantize_weights is not None:
            codec = by_name(self.quantize_weights)
            quantize_gathers(undo, fsdp_runner, parts, codec, hierarchical=codecs.hierarchical)

    def bound_waits(self, setup: TrainingSetup, runner: Runner, undo: ExitStack) -> None:
        """Bound FSDP's waits by the timeout of `runner`, of a weight algorithm, until `undo` is closed.

        Collective among the ranks that share a copy of the module.
        """
        parts = communicating_parts(setup.inner, setup.sharded_parts)
        shards = undo.enter_context(_open_shards(runner, parts))  # on GPUs too: a rank may have refused to attach
        between_cpus = _between_cpus(shards, parts)
        if between_cpus:
            failure = FirstFailure([shards, runner.process_group])
            bound_gathers(undo, shards, failure, between_cpus)
            for part in between_cpus:
                undo.enter_context(part.watch_gradients())
            bound_reduce_scatters(undo, shards, failure, between_cpus, SameRows(shards.world, parts))


def shard_group_of(parts: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the ranks over which the gradients of all parts are reduce-scattered."""
    groups = []
    for name, part in parts.items():
        label = name or "the module"
        param_groups = fsdp_param_groups(part)
        if len(param_groups) > 1:
            raise ValueError(
                f"attach: {label} has {len(param_groups)} parameter groups on separate meshes, for which torch "
                "takes no custom reduce-scatter; call fully_shard without shard_placement_fn's meshes"
            )
        for param_group in param_groups:
            group = fsdp_shard_group(param_group)
            if group is None:
                raise ValueError(
                    f"attach: {label} is replicated ({type(part).__name__}) by torch's own all-reduce. Either call "
                    "fully_shard with the mesh's shard dimension only, and torchbagua.fsdp.attach with "
                    "replicate_group=mesh.get_group(...) of the replica dimension; or leave out attach, and create the "
                    "mesh with torchbagua.fsdp.register_backend, which replicate() needs"
                )
            if fsdp_is_offloaded(param_group):
                raise ValueError(
                    f"attach: {label} has an OffloadPolicy that keeps parameters on the CPU; call "
                    "fully_shard without it"
                )
            for parameter, _ in fsdp_shards(param_group):
                if (mesh := parameter.device_mesh).ndim != 1:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"attach: {label} has parameters on a mesh of {mesh.ndim} dimensions, for instance of tensor "
                        "parallelism; only fully_shard with a mesh of one dimension is supported"
                    )
            groups.append(group)
    if not groups:
        raise ValueError("attach: no part on which fully_shard was called has parameters")
    if any(group is not groups[0] for group in groups):
        raise ValueError("attach: all parts must be sharded over one group, got fully_shard with several meshes")
    return groups[0]


def _param_groups(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each parameter group, with a label of its part."""
    for name, part in parts.items():
        for param_group in fsdp_param_groups(part):
            yield name or "the module", param_group


def _check_reduce_scatters(parts: Mapping[str, Any]) -> None:
    for label, param_group in _param_groups(parts):
        comm, is_torchs = fsdp_reduce_scatter(param_group)
        if not is_torchs:
            raise ValueError(
                f"attach: {label} has the reduce-scatter {type(comm).__name__} already; leave out "
                "set_custom_reduce_scatter, set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm, "
                "and detach the algorithm of a module around it"
            )


def _check_all_reduce_hooks(parts: Mapping[str, Any]) -> None:
    for label, param_group in _param_groups(parts):
        if (hook := fsdp_all_reduce_hook(param_group)) is not None:
            raise ValueError(
                f"attach: {label} has the all-reduce hook {hook!r} already, and replicate_group needs one; leave out "
                "set_all_reduce_hook, and detach the algorithm of a module around it"
            )


def _check_all_gathers(module: torch.nn.Module, parts: Mapping[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for label, param_group in _param_groups(parts):
        comm, is_torchs = fsdp_all_gather(param_group)
        if not is_torchs:
            raise ValueError(
                f"attach: quantize_weights must be None if {label} has the all-gather {type(comm).__name__} already; "
                "leave out set_custom_all_gather, set_symm_mem_for_comm and "
                "set_allocate_memory_from_process_group_for_comm"
            )
        for parameter, cls in fsdp_own_gathers(param_group):
            raise ValueError(
                f"attach: quantize_weights must be None if {names[id(parameter)]} defines how it is gathered "
                f"({cls.__name__}.fsdp_pre_all_gather)"
            )


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
