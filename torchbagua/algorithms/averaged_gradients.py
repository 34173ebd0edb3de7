"""Which gradients DDP has put an average into."""

from collections.abc import Collection, Mapping

import torch


def with_average(parameters: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Return those into whose gradient DDP has put an average.

    What no rank has used it leaves as it was: None, or the zeros that zero_grad(set_to_none=False) has written.
    """
    gradients = {p: p.grad for p in parameters if p.grad is not None and p.grad.numel()}
    # Where it is not zero, and it seldom is, the first element says it.
    first = _which_are_not_zero({p: gradient[(0,) * gradient.dim()] for p, gradient in gradients.items()})
    rest = _which_are_not_zero({p: gradient.any() for p, gradient in gradients.items() if p not in first})
    return [*first, *rest]


def _which_are_not_zero(numbers: Mapping[torch.Tensor, torch.Tensor]) -> set[torch.Tensor]:
    """Return the parameters whose number is not zero: all of a device are read at once, since that waits for it."""
    alike: dict[torch.device, list[torch.Tensor]] = {}
    for parameter, number in numbers.items():
        alike.setdefault(number.device, []).append(parameter)
    return {
        parameter
        for members in alike.values()
        for parameter, number in zip(members, torch.stack([numbers[p] for p in members]).tolist(), strict=True)
        if number
    }
