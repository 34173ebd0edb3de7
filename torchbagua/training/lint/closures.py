"""A warning about optimizers whose number of backward passes depends on the rank's own loss."""

from torchbagua._warnings import warn_user


def warn_of_closures() -> None:
    """Warn of L-BFGS."""
    warn_user(
        "torchbagua: LBFGS calls its closure as often as the returned loss requires, but ranks must call "
        "backward equally often. Have the closure return the mean of the loss over the ranks; otherwise "
        'training fails with an error such as "Connection reset by peer" when one rank finishes before '
        "the others",
    )
