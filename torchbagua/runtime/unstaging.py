"""Unstaging: the GPU drops staged state that a step must not commit, so that the host does not wait to read a flag."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from torchbagua.runtime.averaged_gradients import has_average


@runtime_checkable
class UnstagingState(Protocol):
    """A `BucketState` that can take back what is staged, element by element."""

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Stage what is kept of those elements of the bucket for which `is_used_N`, [N] bool, is False."""
        ...


def can_unstage(state: object, parameter: torch.Tensor) -> bool:
    """Return whether its device may decide what of `parameter` a step commits, since the host would wait to read it."""
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.numel() > 0
        and is_read_with_a_wait(gradient)
        and isinstance(state, UnstagingState)
    )


def is_read_with_a_wait(tensor: torch.Tensor) -> bool:
    """Return whether the host waits for a device when it reads a value."""
    return not tensor.is_cpu


def unstage_unused(averages: Mapping[torch.Tensor, torch.Tensor], places: Mapping[int, tuple[object, slice]]) -> None:
    """Unstage what is staged of those parameters whose gradient does not hold the average.

    Args:
        averages: see `has_average`; of parameters for which `can_unstage` is true.
        places: by the ids of these parameters and of others, the state of the bucket and the slice of it.
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
    """Return the flag of its parameter for each element of a bucket; True for parameters without one.

    What is staged of those stays: a later step may commit it.
    """
    stays = torch.ones_like(next(iter(flags.values())))
    in_order = sorted(parts, key=lambda place: (place[0].start, place[0].stop))
    return torch.cat([flags.get(number, stays).expand(part.stop - part.start) for part, number in in_order])
