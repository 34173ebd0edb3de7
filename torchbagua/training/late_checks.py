"""Later checks of attach: checks that need the whole group, and checks in the first training step."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import is_joining, num_collectives
from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import StepWatch
from torchbagua.runtime.runner import Runner
from torchbagua.training.attach_checks import require_same_ranks
from torchbagua.training.ddp import JOIN_REFUSAL, check_around
from torchbagua.training.grad_scaler import is_stepped_by_scaler
from torchbagua.training.outer_ddps import CallerWatch, search_ddps_around
from torchbagua.training.setup import TrainingSetup


def check_within_nodes(runner: Runner, setup: TrainingSetup) -> None:
    """Raise ValueError unless DDP can keep averaging gradients within the nodes of the runner's group."""
    if setup.is_sharded:
        raise ValueError(
            f"attach: {runner.name}: hierarchical must be False for a sharded module whose "
            f"replicate_group has several ranks on a node, here {runner.process_group.node_ranks}: gradients are "
            "averaged over the ranks of a mesh, and not of a node"
        )
    subject = f"attach: {runner.name} with hierarchical=True has DDP average gradients within nodes"
    if not setup.ddps:
        raise ValueError(
            f"{subject}, so module must be a DistributedDataParallel, got {setup.label}; with "
            "hierarchical=False every rank trains alone between rounds"
        )
    group = runner.process_group
    for ddp in setup.ddps:
        if ddp.process_group.size() != group.size:
            node = group.node_ranks[group.nodes[group.rank]]
            expected = "the module's ranks, or have them on one node"
            require_same_ranks(ddp.process_group, group.process_group, node, expected)
        if ddp.find_unused_parameters and ddp.process_group.size() == group.size:
            raise ValueError(
                f"{subject}, so a DistributedDataParallel over all ranks must have find_unused_parameters=False: with "
                "True, all nodes would communicate in every step. Wrap the model over the ranks of each node, and give "
                "attach the process_group of all ranks"
            )


def check_first_step(runner: Runner, setup: TrainingSetup, watch: CallerWatch | None) -> None:
    """Check, within the loop's first step, that the loop uses no GradScaler or DDP that attach does not know.

    Warns of an unknown GradScaler. `watch` is of the modules that no DDP may wrap later.

    Raises:
        RuntimeError: a DDP that attach did not know has averaged gradients since.
    """
    if setup.grad_scaler is None and runner.needs_grad_scaler and any(map(is_stepped_by_scaler, setup.optimizers)):
        runner.has_unknown_scaler = True
        consequence = (
            "ranks would skip different steps"
            if runner.averages_weights
            else "residuals would be stored with a wrong scale"
        )
        stepped, algorithm = type(setup.optimizers[0]).__name__, runner.name
        warn_user(
            f"torchbagua: {stepped} is stepped by a GradScaler that {algorithm} was not given: {consequence}; pass the "
            "GradScaler: attach(..., grad_scaler=scaler)",
        )
    if watch is None:
        return
    found = watch.new
    if not watch.has_seen_all:
        plain = [module for module in setup.modules if not isinstance(module, DistributedDataParallel)]
        found = [ddp for ddp in search_ddps_around(plain) if ddp not in setup.ddps]
    if found:
        _refuse_later_ddp(found[0])
    watch.on_new = _refuse_later_ddp


def watch_collectives_of_first_steps(setup: TrainingSetup, runner: Runner) -> None:
    """Warn if an optimizer communicates in its first step, as it does if it divides the work among the ranks.

    Only collectives of the attached group, of the DDPs' groups and of the default group are seen. For a sharded module
    the default group is left out, since its optimizer may gather weights over it. A step with a closure is not
    examined: the closure may communicate.
    """
    groups = [runner.process_group.process_group, *(ddp.process_group for ddp in setup.ddps)]
    if dist.is_initialized() and dist.group.WORLD is not None and not setup.is_sharded:
        groups.append(dist.group.WORLD)
    groups = list(dict.fromkeys(groups))
    for watch in runner.step_watches:
        watch.call_at_next_start(partial(_count_collectives, watch, groups, runner.name))


def _count_collectives(
    watch: StepWatch, groups: list[dist.ProcessGroup], algorithm: str, args: Any, kwargs: Any
) -> None:
    if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
        return
    before = sum(map(num_collectives, groups))

    def after_step(optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        watch.remove(after_step)
        if (number := sum(map(num_collectives, groups)) - before) > 0:
            name = type(optimizer).__name__
            warn_user(
                f"torchbagua: {name} has issued {number} collectives in its first step(). If it divides the parameters "
                f"among the ranks, {algorithm} trains each of them on one rank's batches only, and still sends all of "
                f"them in every step. Use a {name} that steps all parameters on every rank, or a gradient algorithm"
            )

    watch.add(after_step, reads_overflow=False)


def _refuse_later_ddp(ddp: DistributedDataParallel) -> None:
    raise RuntimeError(
        f"torchbagua: {type(ddp.module).__name__} was wrapped in DistributedDataParallel after attach, so "
        "DistributedDataParallel averages gradients alongside the algorithm: wrap it before attach, and pass attach "
        "the DistributedDataParallel, or a list of all modules"
    )


def check_caller(runner: Runner, setup: TrainingSetup, ddp: DistributedDataParallel) -> None:
    """Raise ValueError if a weight algorithm cannot disable the communication of `ddp`; called in its forward.

    `ddp` wraps the same module as the DDP that attach was given, but is a different one.
    """
    check_around(setup.inner, ddp)
    if is_joining(ddp):
        raise ValueError(f"torchbagua: {JOIN_REFUSAL}")
    if runner.open_node_gradients is not None:
        raise ValueError(
            f"torchbagua: {runner.name} with hierarchical=True has one DistributedDataParallel "
            f"average gradients within nodes, but {type(setup.inner).__name__} was called by another "
            "DistributedDataParallel; call the one that attach was given"
        )
