"""A warning about parameters that several optimizers update."""

from torchbagua._warnings import warn_user
from torchbagua.training.checks import TrainingSetup


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
