"""A warning about optimizers that divide their work among the ranks."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import num_collectives
from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import StepWatch
from torchbagua.runtime.runner import Runner
from torchbagua.training.checks import TrainingSetup


def watch_collectives_of_first_steps(setup: TrainingSetup, runner: Runner) -> ExitStack:
    """Warn if an optimizer communicates in its first step, as it does if it divides the work among the ranks.

    Only collectives of the attached group, of the DDPs' groups and of the default group are seen. For a sharded module
    the default group is left out, since its optimizer may gather weights over it. A step with a closure is not
    examined: the closure may communicate. The returned stack, when it is closed, ends the watch.
    """
    groups = [runner.process_group.process_group, *(ddp.process_group for ddp in setup.ddps)]
    if dist.is_initialized() and dist.group.WORLD is not None and not setup.is_sharded:
        groups.append(dist.group.WORLD)
    groups = list(dict.fromkeys(groups))
    undo = ExitStack()
    for watch in runner.step_watches:
        watch.call_at_next_start(partial(_count_collectives, watch, groups, runner.name, undo))
    return undo


def _count_collectives(
    watch: StepWatch, groups: list[dist.ProcessGroup], algorithm: str, undo: ExitStack, args: Any, kwargs: Any
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
    undo.callback(watch.remove, after_step)  # the step may raise
