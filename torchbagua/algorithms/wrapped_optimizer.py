"""Optimizers that frameworks wrap around a torch optimizer: accelerate's, Lightning's."""

from typing import Any

import torch

from torchbagua.torch_private import step_hooks_of


def unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer whose `step` is called in the end, where `optimizer` only hands calls on to it.

    One that has step hooks of its own, such as a Lookahead, is what it says: its step is more than that of the
    optimizer in it.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if step_hooks_of(optimizer) not in (None, step_hooks_of(inner)):
            break
        optimizer = inner
    return optimizer
