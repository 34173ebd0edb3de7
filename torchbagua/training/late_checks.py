"""Later checks of attach: checks that need the whole group, and checks in the first training step."""

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
