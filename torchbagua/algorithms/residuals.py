"""The residuals of an algorithm's buckets, kept by parameter: buckets come and go."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import ErrorFeedback, Held
from torchbagua.memory_order import flatten_like, shape_like


class ResidualsByParameter:
    """Error feedback of gradient buckets.

    A bucket that takes the place of another one, as when DDP rebuilds its buckets or a run is resumed, goes on from the
    residuals of its parameters.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[ErrorFeedback, slice]] = {}  # by the parameter's id

    def of_bucket(self, bucket: BaguaBucket) -> ErrorFeedback:
        """Return the error feedback of a new bucket."""
        held = [self._held(tensor.parameter) for tensor in bucket.tensors]
        feedback = ErrorFeedback(Held(*map(torch.cat, zip(*held, strict=True))))
        start = 0
        for tensor in bucket.tensors:
            stop = start + tensor.parameter.numel()
            self._places[id(tensor.parameter)] = (feedback, slice(start, stop))
            start = stop
        return feedback

    def commit(self, moved: Collection[torch.Tensor]) -> None:
        """Commit what is staged of the parameters in `moved`; of others nothing that was sent has been used."""
        moved_ids = {id(parameter) for parameter in moved}
        unused: dict[ErrorFeedback, list[slice]] = {}
        for parameter_id, (feedback, place) in self._places.items():
            parts = unused.setdefault(feedback, [])
            if parameter_id not in moved_ids:
                parts.append(place)
        for feedback, parts in unused.items():
            feedback.commit(without=parts)

    def state_dict(self, names: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what this rank holds, by "sent" and "mean" and by the name of the parameter, in its shape."""
        held = {name: self._held(parameter) for name, parameter in names.items() if id(parameter) in self._places}
        return {
            kind: {name: shape_like(names[name], getattr(both, kind)).clone() for name, both in held.items()}
            for kind in Held._fields
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: a name or a shape is not that of a parameter.
        """
        for kind in Held._fields:
            shapes = {name: tuple(value.shape) for name, value in state[kind].items()}
            unlike = sorted(n for n, shape in shapes.items() if n not in names or shape != tuple(names[n].shape))
            if unlike or state[kind].keys() != state[Held._fields[0]].keys():
                raise ValueError(
                    f"load_state_dict: {kind!r} must hold residuals of the optimizer's parameters, in their shapes, "
                    f"as {Held._fields[0]!r} does; it differs in {unlike[:5] or 'names'}"
                )
        self._places = {}
        for name in state["sent"]:
            held = Held(*(flatten_like(names[name], state[kind][name].float()).clone() for kind in Held._fields))
            self._places[id(names[name])] = (ErrorFeedback(held), slice(0, held.sent.numel()))

    def _held(self, parameter: torch.Tensor) -> Held:
        if id(parameter) in self._places:
            feedback, place = self._places[id(parameter)]
            return feedback.spread(place)
        nothing = torch.zeros(parameter.numel(), device=parameter.device)
        return Held(nothing, nothing)
