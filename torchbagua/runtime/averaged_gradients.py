"""What DDP has put into gradients: whether it has, and whether that is still there when something is added to it."""

import weakref
from collections.abc import Mapping

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua._torch import foreach_max


def with_average(averages: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return those of some parameters into whose gradient DDP has put an average.

    What no rank has used it leaves as it was: None, or the zeros that zero_grad(set_to_none=False) has written. Where
    the average is zero too, since an algorithm has sent nothing of it say, it has been put there for all that one can
    tell.

    Args:
        averages: by the parameter, the average that DDP had.
    """
    gradients = {p: p.grad for p in averages if p.grad is not None and p.grad.numel()}
    # Where it is not zero, and it seldom is, the first element says it.
    first = _which_are_not_zero({p: gradient[(0,) * gradient.dim()] for p, gradient in gradients.items()})
    rest = _which_are_not_zero({p: _is_not_zero(gradient) for p, gradient in gradients.items() if p not in first})
    zeros = gradients.keys() - first - rest
    left_out = _which_are_not_zero({p: _is_not_zero(averages[p]) for p in zeros})
    return [p for p in gradients if p not in left_out]


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


def has_average(averages: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Return for each parameter whether `with_average` would return it, as a bool on its device.

    The host does not wait. It reads all gradients, and all averages.

    Args:
        averages: as for `with_average`; the parameters have gradients, which are not empty, on one device.
    """
    gradients = [_bytes_of(parameter.grad) for parameter in averages if parameter.grad is not None]
    largest = foreach_max([*gradients, *map(_bytes_of, averages.values())])
    in_gradient, in_average = (torch.stack(largest) != 0).view(2, -1)
    return dict(zip(averages, (in_gradient | ~in_average).unbind(), strict=True))


def _is_not_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether some element is not zero, which -0.0 may be said to be."""
    return _bytes_of(tensor).any()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes of which one is not zero if some element is not.

    Its own, where that is possible: `any` of floats makes a bool of each first, in memory that is new every time.
    """
    return tensor.view(torch.uint8) if tensor.dim() and tensor.stride(-1) == 1 else (tensor != 0).view(torch.uint8)


class AverageInGradient:
    """What becomes of the average that DDP has put into a parameter's gradient, until the next synchronised backward.

    It looks when autograd is about to add something: after that, a gradient that had been cleared looks like any other.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._hook: RemovableHandle | None = None
        self._average: torch.Tensor | None = None
        self._is_uncleared = True
        self._num_additions = 0

    def begin(self, average: torch.Tensor) -> None:
        """Watch from here on. The average is about to be formed in `average`, and written into the gradient."""
        parameter = self._parameter()
        if self._hook is None and parameter is not None and parameter.requires_grad:
            self._hook = parameter.register_hook(self._before_addition)
        self._average, self._is_uncleared, self._num_additions = average, True, 0

    def end(self) -> None:
        """Watch no more."""
        self._average = None

    def close(self) -> None:
        """Let go of the parameter."""
        self.end()
        if self._hook is not None:
            self._hook.remove()

    @property
    def pending(self) -> torch.Tensor | None:
        """The average, unless it is known to be used, or gone: it was cleared before something was added."""
        return self._average if self._is_uncleared else None

    @property
    def is_still_in_gradient(self) -> bool:
        """Whether the average is still in the gradient, beside what has been added to it since."""
        return self.pending is not None and (self._num_additions > 0 or self._holds_something())

    @property
    def is_untouched_in_gradient(self) -> bool:
        """Whether it is still in the gradient, and nothing has been added to it."""
        return self.is_still_in_gradient and self._num_additions == 0

    def _before_addition(self, _: torch.Tensor) -> None:
        if self._average is not None:
            self._num_additions += 1
            self._is_uncleared = self._is_uncleared and self._holds_something()

    def _holds_something(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None and bool(_is_not_zero(parameter.grad))
