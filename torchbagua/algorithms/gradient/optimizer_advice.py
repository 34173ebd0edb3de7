"""Warnings of optimizers with which an algorithm trains badly: what the algorithms' pages measured, said at attach."""

from collections.abc import Sequence

import torch

from torchbagua._warnings import warn_user


def adam_among(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the class name of the first Adam, in any of its forms (AdamW, FusedAdam, Adam8bit), or None."""
    # By name: forms of other packages do not derive from torch's.
    adams = [one for one in optimizers if any("Adam" in cls.__name__ for cls in type(one).__mro__)]
    return type(adams[0]).__name__ if adams else None


def warn_of_sparse_means(algorithm: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of an Adam, or else of a momentum, that gets the sparse mean of `algorithm`, with error feedback."""
    if adam := adam_among(optimizers):
        warn_user(
            f"torchbagua: {algorithm} with {adam} trains badly: {adam} divides by the size of gradients, most elements "
            "of which are zero here. Use CompressedAllReduceAlgorithm() in 4 bits or QAdamAlgorithm in one bit, or "
            "train with SGD"
        )
        return
    for optimizer in optimizers:
        momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
        if momenta:
            warn_user(
                f"torchbagua: {algorithm} with the momentum {momenta[0]} of {type(optimizer).__name__} may diverge: it "
                "counts as new what has waited to be sent. Set that momentum to 0, and raise the learning rate or use "
                f"TopKAlgorithm(momentum={momenta[0]}, warmup_steps=...)"
            )
            return
