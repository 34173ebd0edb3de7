"""Warnings about the optimizers that attach was given."""

import torch

from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.training.setup import TrainingSetup


def warn_of_shared_parameters(setup: TrainingSetup) -> None:
    """Warn if two optimizers have the same parameter. This works, but few programs intend it."""
    owners: dict[str, tuple[int, str]] = {}
    for index, (optimizer, parameters) in enumerate(setup.optimizer_parameters()):
        for parameter in parameters:  # torch warns of a parameter that an optimizer has twice
            first, owner = owners.setdefault(parameter, (index, optimizer))
            if first != index:
                warn_user(
                    f"torchbagua: {parameter} is a parameter of both {owner} and {optimizer}, so each of them updates "
                    "it. If you do not intend this, remove it from one of them"
                )
                return


def warn_of_parameters_without_optimizer(setup: TrainingSetup) -> None:
    """Warn about parameters that require gradients but belong to no attached optimizer: another one may step them."""
    stepped = {id(parameter) for optimizer in setup.optimizers for parameter in parameters_of(optimizer)}
    names = [name for name, parameter in setup.trained().items() if id(parameter) not in stepped]
    if names:
        if len(names) == 1:
            unstepped, them = f"{names[0]}, although it requires gradients", "it"
        else:
            unstepped, them = f"{names[0]} (and {len(names) - 1} more), although they require gradients", "them"
        warn_user(
            f"torchbagua: no attached optimizer steps {unstepped}. If another optimizer steps {them}, pass attach a "
            "list of all optimizers: otherwise weights are averaged between their steps. If nothing steps "
            f"{them}, call requires_grad_(False)"
        )


def warn_of_closures(setup: TrainingSetup) -> None:
    """Warn of optimizers whose number of backward passes depends on the rank's own loss."""
    for optimizer in setup.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            warn_user(
                "torchbagua: LBFGS calls its closure as often as the returned loss requires, but ranks must call "
                "backward equally often. Have the closure return the mean of the loss over the ranks; otherwise "
                'training fails with an error such as "Connection reset by peer" when one rank finishes before '
                "the others",
            )
