"""Warnings, issued by attach, about optimizers that train badly with an algorithm, as the docs' measurements show."""

from collections.abc import Sequence

import torch

from torchbagua._warnings import warn_user


def adam_among(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the class name of the first Adam variant (Adam, AdamW, FusedAdam, Adam8bit, ...), or None."""
    # By name, because variants in other packages do not derive from torch's Adam.
    adams = [optimizer for optimizer in optimizers if any("Adam" in cls.__name__ for cls in type(optimizer).__mro__)]
    return type(adams[0]).__name__ if adams else None


def warn_of_sparse_means(algorithm: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn about an Adam, or else a momentum, that steps on the sparse mean of `algorithm`, with error feedback."""
    if adam := adam_among([optimizer for optimizer in optimizers if not _steps_along_signs(optimizer)]):
        warn_user(
            f"torchbagua: {algorithm} with {adam} trains badly: {adam} averages over steps, and in each step most "
            "gradient elements are zero. Use torch.optim.AdamW with betas=(0.0, 0.0), which steps along the signs of "
            "the sent elements, a learning rate 3 to 20 times as large, larger for a smaller ratio, and a weight decay "
            "that is as many times smaller. Or use CompressedAllReduceAlgorithm() with 4 bits or QAdamAlgorithm with "
            "one bit, or train with SGD"
        )
        return
    for optimizer in optimizers:
        momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
        if momenta:
            instead = f" or use TopKAlgorithm(momentum={momenta[0]}, warmup_steps=...)"
            warn_user(
                f"torchbagua: {algorithm} with the momentum {momenta[0]} of {type(optimizer).__name__} may diverge: "
                "the momentum treats delayed gradients as new. Set that momentum to 0, and increase the learning rate"
                f"{instead if isinstance(optimizer, torch.optim.SGD) else ''}"
            )
            return


def check_betas(owner: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError, prefixed with `owner`, if only the first beta of an Adam is not 0, as a scheduler can set it.

    The mean of the gradients is then divided by the magnitude of the last one, which is 0 for most elements.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            betas = group.get("betas")
            if betas is not None and len(betas) == 2 and betas[0] and not betas[1]:
                raise ValueError(
                    f"{owner}: the first of {type(optimizer).__name__}'s betas must be 0 if the second is, got "
                    f"{betas}; if a scheduler such as OneCycleLR sets it, pass cycle_momentum=False to the scheduler"
                )


def _steps_along_signs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is an AdamW with betas of 0, which divides a gradient by its own magnitude.

    Adam adds its weight decay to the gradient, and so would move elements that were not sent by a whole step.
    """
    is_adamw = any("AdamW" in cls.__name__ for cls in type(optimizer).__mro__)
    return is_adamw and not any(any(group.get("betas", (1,))) for group in optimizer.param_groups)
