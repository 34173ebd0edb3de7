"""How many updates Adam has made of a parameter, known on the host: on a GPU it costs a wait to ask."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchbagua._torch import num_writes


class _Known(NamedTuple):
    step: Tensor
    num_writes: int
    num_updates: int


class AdamUpdates:
    """Adam's "step" of parameters, which with `fused=True` lies where the parameter does.

    It is read once, and again where somebody else has replaced it or written to it, by loading a state say.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the parameter's id

    def of(self, parameter: Tensor, state: Mapping[str, Any]) -> int:
        """Return the number of updates; `state` is Adam's of the parameter, empty before the first."""
        if not state:
            return 0
        step = state["step"]
        known = self._known.get(id(parameter))
        if known is None or known.step is not step or known.num_writes != num_writes(step):
            known = self._known[id(parameter)] = _Known(step, num_writes(step), int(step))
        return known.num_updates

    def set_to(self, num_updates: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Make known that Adam, who has just written to the parameter's `state`, has come to `num_updates`."""
        self._known[id(parameter)] = _Known(state["step"], num_writes(state["step"]), num_updates)
