"""Unstaging: the GPU drops staged state that a step must not commit, so that the host does not wait for a flag."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from torchbagua.runtime.averaged_gradients import has_average


@runtime_checkable
class UnstagingState(Protocol):
    """A `BucketState` that can revert its staged values, element by element."""

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Replace the staged values by the committed ones for elements whose `is_used_N`, [N] bool, is False."""
        ...


def can_unstage(state: object, parameter: torch.Tensor) -> bool:
    """Return whether the device decides if a step commits the state of `parameter`, since a host read would block."""
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.numel() > 0
        and requires_host_sync(gradient)
        and isinstance(state, UnstagingState)
    )


def requires_host_sync(tensor: torch.Tensor) -> bool:
    """Return whether the host blocks on the device when it reads a value of `tensor`."""
    return not tensor.is_cpu


def unstage_unused(averages: Mapping[torch.Tensor, torch.Tensor], places: Mapping[int, tuple[object, slice]]) -> None:
    """Unstage the state of parameters with gradients that do not contain the average.

    Args:
        averages: see `has_average`; for parameters for which `can_unstage` is true.
        places: the bucket state and the slice in it, by parameter id, for these parameters and others.
    """
    if not averages:
        return
    is_used = {id(parameter): flag for parameter, flag in has_average(averages).items()}
    by_state: dict[int, tuple[object, list[tuple[slice, int]]]] = {}
    for parameter_id, (state, part) in places.items():
        by_state.setdefault(id(state), (state, []))[1].append((part, parameter_id))
    for state, parts in by_state.values():
        if isinstance(state, UnstagingState) and any(parameter_id in is_used for _, parameter_id in parts):
            state.unstage(_flags_of_elements(parts, is_used))


def _flags_of_elements(parts: Sequence[tuple[slice, int]], flags: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return for each element of a bucket the flag of its parameter, or True for a parameter without a flag.

    The staged values of parameters without a flag remain staged, since a later step may commit them.
    """
    default = torch.ones_like(next(iter(flags.values())))
    in_order = sorted(parts, key=lambda place: (place[0].start, place[0].stop))
    return torch.cat([flags.get(number, default).expand(part.stop - part.start) for part, number in in_order])
