"""Checks of the options of QAdamOptimizer's parameter groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def check_group(group: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError, which names the option, if a param group of QAdamOptimizer is invalid."""
    warmup_steps = group["warmup_steps"]
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool):
        raise TypeError(f"QAdamOptimizer: warmup_steps must be an integer, got {warmup_steps!r}")
    if warmup_steps < 1:
        raise ValueError(f"QAdamOptimizer: warmup_steps must be at least 1, got {warmup_steps}")
    check_numbers(group)
    for option in ("amsgrad", "capturable", "differentiable"):
        if group[option]:
            raise ValueError(f"QAdamOptimizer: {option} must be False, got {group[option]!r}")
    for option in ("maximize", "decoupled_weight_decay"):
        if not isinstance(group[option], bool):
            raise TypeError(f"QAdamOptimizer: {option} must be True or False, got {group[option]!r}")
    for parameter in group["params"]:
        if parameter.is_complex():
            raise ValueError(f"QAdamOptimizer: params must be real, got a parameter of dtype {parameter.dtype}")


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if lr, eps, weight_decay or betas are invalid for Adam."""
    for name in ("lr", "eps", "weight_decay"):
        value = options[name]
        if not _is_number(value):
            raise TypeError(f"QAdamOptimizer: {name} must be a number, got {value!r}")
        if not value >= 0:  # NaN compares false
            raise ValueError(f"QAdamOptimizer: {name} must be at least 0, got {value}")
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise TypeError(f"QAdamOptimizer: betas must be two numbers, got {betas!r}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"QAdamOptimizer: betas must be two numbers in [0, 1), got {betas}")


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )
