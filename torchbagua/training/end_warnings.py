"""Warnings when an attachment ends, or nobody can end it any more."""

import weakref
from collections.abc import Sequence

from torchbagua._warnings import warn_user, warn_user_beside_error
from torchbagua.algorithms.base import Algorithm
from torchbagua.runtime.runner import Runner


def warn_of_missing_detach(reference: weakref.ref[Runner]) -> None:
    """Warn, as the program ends or nobody has the attachment. It must not keep the runner, which keeps the module."""
    runner = reference()
    if runner is not None and runner.replicas_diverge():
        warn_user(
            f"torchbagua: {runner.name} was not detached, and nobody can do it any more: ranks are "
            f"left with different weights. Call {runner.ended_by} on all ranks when training is done"
        )


def warn_of_unused_optimizers(names: Sequence[str]) -> None:
    """Warn of attached optimizers, given by their classes, that took no step."""
    warn_user(
        f"torchbagua: {' and '.join(names)} took no step while attached, although weights were trained: no round has "
        "averaged them. Attach the optimizer whose step() changes the weights: not one that another has replaced, nor "
        "one around which weights are updated by hand"
    )


def warn_of_different_weights(algorithm: Algorithm) -> None:
    """Warn of weights that an exception, which is on its way, leaves different on each rank."""
    warn_user_beside_error(
        f"torchbagua: an exception has ended {type(algorithm).__name__}: ranks are left with different weights. Before "
        "you train on, wrap the model in DistributedDataParallel again, or attach again to a module without one: both "
        "give all ranks rank 0's weights. Or load a checkpoint on all ranks"
    )
