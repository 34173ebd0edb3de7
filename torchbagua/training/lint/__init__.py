"""Warnings about loops that probably contain a mistake. Each lint is one file, and one line installs it.

May import what `training` may. No result depends on a lint. The lines are here, but for two lints:
training/rank_weights.py has unaveraged_state.py examine states before a mean, and training/attach.py calls
end_warnings.py at the end.
Begin with unaveraged_gradients.py.
"""

from contextlib import ExitStack

from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.runner import Runner
from torchbagua.training.lint.optimizers import (
    warn_of_closures,
    warn_of_parameters_without_optimizer,
    warn_of_shared_parameters,
)
from torchbagua.training.setup import TrainingSetup


def lint_arguments(setup: TrainingSetup) -> None:
    """Warn about arguments of attach."""
    warn_of_shared_parameters(setup)
    warn_of_closures(setup)
    if setup.algorithm.averages_weights:
        warn_of_parameters_without_optimizer(setup)
    elif setup.ddps:
        from torchbagua.training.lint.large_buckets import warn_of_large_buckets

        warn_of_large_buckets(setup)


def install_lints(setup: TrainingSetup, runner: Runner) -> ExitStack:
    """Watch the training loop until the returned stack is closed."""
    undo = ExitStack()
    if not isinstance(runner, GradientRunner):
        if runner.process_group.size > 1:
            from torchbagua.training.lint.collectives import watch_collectives_of_first_steps

            watch_collectives_of_first_steps(setup, runner)
        return undo
    if setup.ddps and runner.process_group.size > 1:
        from torchbagua.training.lint.unaveraged_gradients import UnaveragedGradients

        undo.callback(UnaveragedGradients(setup, runner).close)
    if setup.optimizers_of_copies:
        from torchbagua.training.lint.master_check import MasterCheck

        undo.callback(MasterCheck(setup, runner).close)
    return undo
