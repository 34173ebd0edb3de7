"""The number of Adam updates of each parameter, cached on the host because reading it from a GPU synchronizes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchbagua._torch import num_writes


class _Known(NamedTuple):
    step: Tensor
    num_writes: int
    num_updates: int


class AdamUpdates:
    """Caches Adam's "step" of each parameter, which with `fused=True` is on the parameter's device.

    It is read once, and again after other code has replaced it or written to it, for example by loading a state.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the parameter's id

    def of(self, parameter: Tensor, state: Mapping[str, Any]) -> int:
        """Return the number of updates. `state` is Adam's state of the parameter, which is empty before the first."""
        if not state:
            return 0
        step = state["step"]
        known = self._known.get(id(parameter))
        if known is None or known.step is not step or known.num_writes != num_writes(step):
            known = self._known[id(parameter)] = _Known(step, num_writes(step), int(step))
        return known.num_updates

    def set_to(self, num_updates: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Record `num_updates`, after Adam has written to the parameter's `state`."""
        self._known[id(parameter)] = _Known(state["step"], num_writes(state["step"]), num_updates)
