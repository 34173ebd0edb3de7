"""Optimizers that frameworks wrap around a torch optimizer: accelerate's, Lightning's."""

from typing import Any

import torch


def unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer that `optimizer` hands its calls on to, where that is all it does.

    Such a wrapper has the other's state. One with a state of its own, a Lookahead for instance, does more in a step
    than the optimizer in it.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if getattr(optimizer, "state", None) is not inner.state:
            break
        optimizer = inner
    return optimizer
