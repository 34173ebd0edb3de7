"""Warnings about loops that probably contain a mistake. Each lint is one file, and one line installs it.

May import what `training` may. A lint is imported only if it applies. Those that watch the loop run in its first steps,
and then leave. The lines are here, except that training/attach.py calls end_warnings.py at the end.
Begin with unaveraged_gradients.py.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from torchbagua._torch import named_bucket_bytes
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.checks import TrainingSetup

if TYPE_CHECKING:
    from torchbagua.training.weights import RankWeights

# No lint warns of smaller buckets.
_LARGE_BUCKET_BYTES = 5 << 20


def lint_arguments(setup: TrainingSetup) -> None:
    """Warn about arguments of attach."""
    if len(setup.optimizers) > 1:
        from torchbagua.training.lint.shared_parameters import warn_of_shared_parameters

        warn_of_shared_parameters(setup)
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in setup.optimizers):
        from torchbagua.training.lint.closures import warn_of_closures

        warn_of_closures()
    if setup.algorithm.averages_weights:
        stepped = {id(parameter) for optimizer in setup.optimizers for parameter in parameters_of(optimizer)}
        if unstepped := [name for name, parameter in setup.trained().items() if id(parameter) not in stepped]:
            from torchbagua.training.lint.unstepped_parameters import warn_of_unstepped_parameters

            warn_of_unstepped_parameters(unstepped)
    elif any((named_bucket_bytes(ddp) or 0) > _LARGE_BUCKET_BYTES for ddp in setup.ddps):
        from torchbagua.training.lint.large_buckets import warn_of_large_buckets

        warn_of_large_buckets(setup)


def install_gradient_lints(setup: TrainingSetup, runner: GradientRunner, undo: ExitStack) -> None:
    """Watch the first steps with a gradient algorithm, at most until `undo` is closed."""
    if setup.ddps and runner.process_group.size > 1:
        from torchbagua.training.lint.unaveraged_gradients import UnaveragedGradients

        undo.callback(UnaveragedGradients(setup, runner).close)
    if setup.optimizers_of_copies:
        from torchbagua.training.lint.master_copies import MasterCopies

        undo.callback(MasterCopies(setup, runner).close)


def install_weight_lints(setup: TrainingSetup, runner: WeightRunner, weights: "RankWeights", undo: ExitStack) -> None:
    """Watch the first steps with a weight algorithm, at most until `undo` is closed.

    Call it before the hooks that end a step are installed, since a round changes the weights that a lint looks at.
    """
    if runner.process_group.size == 1:
        return
    from torchbagua.training.lint.unaveraged_state import UnaveragedState

    undo.callback(UnaveragedState(weights, runner).close)
    if any(not type(optimizer).__module__.startswith("torch.optim.") for optimizer in setup.optimizers):
        from torchbagua.training.lint.collectives import watch_collectives_of_first_steps

        undo.enter_context(watch_collectives_of_first_steps(setup, runner))
