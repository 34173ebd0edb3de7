"""A warning about parameters that no attached optimizer steps, though their weights are averaged."""

from collections.abc import Sequence

from torchbagua._warnings import warn_user


def warn_of_unstepped_parameters(names: Sequence[str]) -> None:
    """Warn about parameters that require gradients but belong to no attached optimizer: another one may step them."""
    if len(names) == 1:
        unstepped, them = f"{names[0]}, although it requires gradients", "it"
    else:
        unstepped, them = f"{names[0]} (and {len(names) - 1} more), although they require gradients", "them"
    warn_user(
        f"torchbagua: no attached optimizer steps {unstepped}. If another optimizer steps {them}, pass attach a "
        "list of all optimizers: otherwise weights are averaged between their steps. If nothing steps "
        f"{them}, call requires_grad_(False)"
    )
