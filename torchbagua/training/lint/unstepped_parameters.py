"""A warning about parameters that no attached optimizer steps, though their weights are averaged."""

from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.training.checks import TrainingSetup


def warn_of_unstepped_parameters(setup: TrainingSetup) -> None:
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
