"""Warnings for the end of an attachment, or for an attachment that can no longer be detached."""

import weakref
from collections.abc import Sequence

from torchbagua._warnings import warn_user, warn_user_during_error
from torchbagua.algorithms.base import Algorithm
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.steps import StepClock


def warn_of_missing_detach(
    runner_reference: weakref.ref[WeightRunner], clock_reference: weakref.ref[StepClock]
) -> None:
    """Warn if an attachment was lost, or the program ended, after training and before `detach`.

    It takes weak references: others would keep the module alive.
    """
    runner, clock = runner_reference(), clock_reference()
    if runner is None or clock is None or runner.lane.is_of_other_process:
        return
    if runner.replicas_diverge() and clock.has_trained:
        warn_user(
            f"torchbagua: {runner.name} was not detached, and can no longer be: ranks are "
            f"left with different weights. Call {runner.ended_by} on all ranks when training is done"
        )


def warn_of_unused_optimizers(names: Sequence[str]) -> None:
    """Warn of attached optimizers that took no step; `names` are their classes."""
    warn_user(
        f"torchbagua: {' and '.join(names)} took no step while attached, although weights were trained: no round has "
        "averaged them. Attach the optimizer whose step() updates these weights, not an optimizer that was "
        "replaced or that manual updates bypass"
    )


def warn_of_different_weights(algorithm: Algorithm) -> None:
    """Warn that the exception now being raised leaves different weights on each rank."""
    warn_user_during_error(
        f"torchbagua: an exception has ended {type(algorithm).__name__}: ranks are left with different weights. Before "
        "you continue training, wrap the model in DistributedDataParallel again, or attach again to a module without "
        "DistributedDataParallel: both give all ranks rank 0's weights. Or load a checkpoint on all ranks"
    )
