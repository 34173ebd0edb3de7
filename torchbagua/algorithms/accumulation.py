"""Whether what DDP has put into a gradient is still in it when something is added to it."""

import weakref

import torch
from torch.utils.hooks import RemovableHandle


class Accumulation:
    """Watches a parameter's gradient from one synchronised backward pass to the next.

    It looks when autograd is about to add something: after that, a gradient that had been cleared looks like any other.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._hook: RemovableHandle | None = None
        self._is_watched = False
        self._is_kept = True
        self._num_additions = 0

    def begin(self) -> None:
        """Watch from here on, where DDP is about to write an average into the gradient."""
        parameter = self._parameter()
        if self._hook is None and parameter is not None and parameter.requires_grad:
            self._hook = parameter.register_hook(self._before_addition)
        self._is_watched, self._is_kept, self._num_additions = True, True, 0

    def end(self) -> None:
        """Watch no more."""
        self._is_watched = False

    def close(self) -> None:
        """Let go of the parameter."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def is_kept(self) -> bool:
        """Whether the average is still in the gradient."""
        return self._is_watched and self._is_kept and (self._num_additions > 0 or self._holds_something())

    @property
    def is_alone(self) -> bool:
        """Whether it is, and nothing has been added to it."""
        return self.is_kept and self._num_additions == 0

    def _before_addition(self, _: torch.Tensor) -> None:
        if self._is_watched:
            self._num_additions += 1
            self._is_kept = self._is_kept and self._holds_something()

    def _holds_something(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None and bool(parameter.grad.any())
