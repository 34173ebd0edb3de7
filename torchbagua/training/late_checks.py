"""Later checks of attach: those that need the whole group, and those of the first training step."""

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import is_joining
from torchbagua._warnings import warn_user
from torchbagua.runtime.runner import Runner
from torchbagua.training.attach_checks import require_same_ranks
from torchbagua.training.ddp import JOIN_REFUSAL, check_around
from torchbagua.training.grad_scaler import is_stepped_by_scaler
from torchbagua.training.outer_ddps import CallerWatch, search_ddps_around
from torchbagua.training.setup import TrainingSetup


def check_within_nodes(runner: Runner, setup: TrainingSetup) -> None:
    """Raise ValueError unless DDP can go on averaging gradients within the nodes of the runner's group."""
    if setup.is_sharded:
        raise ValueError(
            f"attach: {runner.name}: hierarchical must be False for a sharded module whose "
            f"replicate_group has several ranks on a node, here {runner.process_group.node_ranks}: gradients are "
            "averaged among the ranks of a mesh, and not of a node"
        )
    subject = f"attach: {runner.name} with hierarchical=True has DDP average gradients within nodes"
    if not setup.ddps:
        raise ValueError(
            f"{subject}, so module must be a DistributedDataParallel, got {type(setup.module).__name__}; with "
            "hierarchical=False every rank trains alone between rounds"
        )
    group = runner.process_group
    for ddp in setup.ddps:
        if ddp.process_group.size() != group.size:
            node = group.node_ranks[group.nodes[group.rank]]
            what = "the module's ranks, or have them on one node"
            require_same_ranks(ddp.process_group, group.process_group, node, what)
        if ddp.find_unused_parameters and ddp.process_group.size() == group.size:
            raise ValueError(
                f"{subject}, so a DistributedDataParallel of all ranks must have find_unused_parameters=False: with "
                "it all nodes would talk in every step; wrap the model over the ranks of each node, and give "
                "attach the process_group of all"
            )


def check_first_step(runner: Runner, setup: TrainingSetup, watch: CallerWatch | None) -> None:
    """Say, within the loop's first step, what of it an attached algorithm should have been told.

    Raises:
        RuntimeError: a DDP that nobody knew of has averaged gradients meanwhile.
    """
    if setup.grad_scaler is None and runner.needs_grad_scaler and any(map(is_stepped_by_scaler, setup.optimizers)):
        what = (
            "ranks would skip different steps"
            if runner.averages_weights
            else "what it keeps from step to step would not be in the unit of gradients"
        )
        stepped, algorithm = type(setup.optimizers[0]).__name__, runner.name
        warn_user(
            f"torchbagua: a GradScaler steps {stepped}, and {algorithm} does not know it: {what}; pass it: "
            "attach(..., grad_scaler=scaler)",
        )
    if watch is None or setup.ddp is setup.module:
        return
    new = watch.new if watch.has_seen else [ddp for ddp in search_ddps_around(setup.module) if ddp not in setup.ddps]
    if new:
        _refuse_later_ddp(setup.module)
    watch.on_new = lambda ddp: _refuse_later_ddp(setup.module)


def _refuse_later_ddp(module: torch.nn.Module) -> None:
    raise RuntimeError(
        f"torchbagua: {type(module).__name__} was wrapped in DistributedDataParallel after attach, which averages "
        "gradients beside the algorithm: wrap it before attach"
    )


def check_caller(runner: Runner, setup: TrainingSetup, ddp: DistributedDataParallel) -> None:
    """Raise ValueError where an algorithm that averages weights cannot silence `ddp`, in whose forward this is called.

    `ddp` is another one than that which attach was given, around the same module.
    """
    check_around(setup.inner, ddp)
    if is_joining(ddp):
        raise ValueError(f"torchbagua: {JOIN_REFUSAL}")
    if runner.open_node_gradients is not None:
        raise ValueError(
            f"torchbagua: {runner.name} with hierarchical=True has one DistributedDataParallel "
            f"average gradients within nodes, and {type(setup.inner).__name__} was called by another one; call the one "
            "that attach was given"
        )
