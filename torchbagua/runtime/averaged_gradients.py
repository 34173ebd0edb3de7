"""DDP's averages in gradients: whether DDP has written one, and whether it is still there when autograd adds to it."""

import weakref
from collections.abc import Mapping

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua._torch import foreach_max


def parameters_with_average(averages: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters for which DDP has written an average into the gradient.

    DDP does not change the gradient of a parameter that no rank has used. It stays None, or the zeros that
    zero_grad(set_to_none=False) wrote. If the average is zero too, for example because an algorithm has not sent it,
    the two cases cannot be distinguished, and the parameter counts as written.
    """
    gradients = {p: p.grad for p in averages if p.grad is not None and p.grad.numel()}
    # The first element of a gradient is seldom zero, so it usually settles the question.
    first = _nonzero_parameters({p: gradient[(0,) * gradient.dim()] for p, gradient in gradients.items()})
    rest = _nonzero_parameters({p: _is_not_zero(gradient) for p, gradient in gradients.items() if p not in first})
    zeros = gradients.keys() - first - rest
    unwritten = _nonzero_parameters({p: _is_not_zero(averages[p]) for p in zeros})
    return [p for p in gradients if p not in unwritten]


def _nonzero_parameters(numbers: Mapping[torch.Tensor, torch.Tensor]) -> set[torch.Tensor]:
    """Return the parameters with a nonzero number. Read all numbers of a device at once, since a read synchronizes."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter, number in numbers.items():
        by_device.setdefault(number.device, []).append(parameter)
    return {
        parameter
        for members in by_device.values()
        for parameter, number in zip(members, torch.stack([numbers[p] for p in members]).tolist(), strict=True)
        if number
    }


def has_average(averages: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Return for each parameter whether `parameters_with_average` would return it, as a bool on its device.

    The host does not wait. The device reads all gradients and all averages.
    """
    gradients = [_bytes_of(parameter.grad) for parameter in averages if parameter.grad is not None]
    largest = foreach_max([*gradients, *map(_bytes_of, averages.values())])
    in_gradient, in_average = (torch.stack(largest) != 0).view(2, -1)
    return dict(zip(averages, (in_gradient | ~in_average).unbind(), strict=True))


def _is_not_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether any element is not zero. -0.0 may count as nonzero."""
    return _bytes_of(tensor).any()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes of which at least one is nonzero if any element is nonzero.

    Return the tensor's bytes if possible: `any` of floats first converts each element to bool, in newly allocated
    memory.
    """
    return tensor.view(torch.uint8) if tensor.dim() and tensor.stride(-1) == 1 else (tensor != 0).view(torch.uint8)


class AverageInGradient:
    """Tracks the average that DDP has written into a parameter's gradient, until the next synchronized backward.

    It inspects the gradient when autograd is about to add to it. Afterwards, a gradient that had been cleared cannot
    be distinguished from any other.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._hook: RemovableHandle | None = None
        self._average: torch.Tensor | None = None
        self._is_uncleared = True
        self._num_additions = 0

    def begin(self, average: torch.Tensor) -> None:
        """Start to track. DDP is about to compute the average in `average` and to write it into the gradient."""
        parameter = self._parameter()
        if self._hook is None and parameter is not None and parameter.requires_grad:
            self._hook = parameter.register_hook(self._before_addition)
        self._average, self._is_uncleared, self._num_additions = average, True, 0

    def end(self) -> None:
        """Stop tracking."""
        self._average = None

    def close(self) -> None:
        """Stop tracking, and remove the hook from the parameter."""
        self.end()
        if self._hook is not None:
            self._hook.remove()

    @property
    def pending(self) -> torch.Tensor | None:
        """The average, or None if a step has used it or if the gradient was cleared before autograd added to it."""
        return self._average if self._is_uncleared else None

    @property
    def is_still_in_gradient(self) -> bool:
        """Whether the gradient still contains the average, with or without later additions."""
        return self.pending is not None and (self._num_additions > 0 or self._has_nonzero_gradient())

    @property
    def is_untouched_in_gradient(self) -> bool:
        """Whether the gradient still contains the average, without later additions."""
        return self.is_still_in_gradient and self._num_additions == 0

    def _before_addition(self, _: torch.Tensor) -> None:
        if self._average is not None:
            self._num_additions += 1
            self._is_uncleared = self._is_uncleared and self._has_nonzero_gradient()

    def _has_nonzero_gradient(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None and bool(_is_not_zero(parameter.grad))
