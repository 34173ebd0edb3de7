"""The residuals of an algorithm's buckets, kept by parameter: buckets come and go."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import ErrorFeedback, Held
from torchbagua.memory_order import flatten_like, shape_like


class ResidualsByParameter:
    """Error feedback of gradient buckets.

    A bucket that takes the place of others, as when DDP rebuilds its buckets or a run is resumed, goes on from the
    residuals of its parameters.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[ErrorFeedback, slice]] = {}  # by the parameter's id

    def of_bucket(self, bucket: BaguaBucket) -> ErrorFeedback:
        """Return the error feedback of a new bucket."""
        parameters = [tensor.parameter for tensor in bucket.tensors]
        before = [self._places.get(id(parameter)) for parameter in parameters]
        slices = _consecutive_slices(parameters)
        if before[0] is not None and before == [(before[0][0], part) for part in slices]:
            feedback = before[0][0]  # a bucket of the same parameters
        elif any(place is not None for place in before):
            held = [self._held(parameter) for parameter in parameters]
            feedback = ErrorFeedback(bucket.flat.device, Held(*map(torch.cat, zip(*held, strict=True))))
        else:
            feedback = ErrorFeedback(bucket.flat.device)
        for parameter, part in zip(parameters, slices, strict=True):
            self._places[id(parameter)] = (feedback, part)
        return feedback

    def commit(self, used: Collection[torch.Tensor]) -> None:
        """Commit what is staged of the parameters in `used`; of others nothing that was sent has been used."""
        used_ids = {id(parameter) for parameter in used}
        unused: dict[ErrorFeedback, list[slice]] = {}
        for parameter_id, (feedback, place) in self._places.items():
            parts = unused.setdefault(feedback, [])
            if parameter_id not in used_ids:
                parts.append(place)
        for feedback, parts in unused.items():
            feedback.commit(without=parts)

    def state_dict(self, named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what this rank holds, by "sent" and "mean" and by the name of the parameter, in its shape.

        Zeros where there is nothing yet: torch.distributed.checkpoint loads into a state that has all the keys.
        """
        held = {name: self._held(parameter) for name, parameter in named.items()}
        return {
            kind: {name: shape_like(named[name], getattr(both, kind)).clone() for name, both in held.items()}
            for kind in Held._fields
        }

    def load_state_dict(self, owner: str, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: it holds other names or shapes than those of parameters; names `owner`.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        first, *others = (_shapes_in(state[kind]) for kind in Held._fields)
        if first is None or any(other != first for other in others) or not first.items() <= shapes.items():
            wrong = [name for name, shape in (first or {}).items() if shapes.get(name) != shape]
            raise ValueError(
                f"{owner}.load_state_dict: {' and '.join(Held._fields)} must hold tensors of the same names, which are "
                f"parameters of the optimizer, in their shapes, got others{f', {wrong[:5]}' if wrong else ''}"
            )
        self._places = {}
        for name in first:
            parameter = named[name]
            held = Held(*(flatten_like(parameter, state[kind][name].float()).clone() for kind in Held._fields))
            self._places[id(parameter)] = (ErrorFeedback(parameter.device, held), slice(0, parameter.numel()))

    def _held(self, parameter: torch.Tensor) -> Held:
        if id(parameter) in self._places:
            feedback, place = self._places[id(parameter)]
            return feedback.spread(place)
        nothing = torch.zeros(parameter.numel(), device=parameter.device)
        return Held(nothing, nothing)


def _consecutive_slices(parameters: list[torch.Tensor]) -> list[slice]:
    slices, start = [], 0
    for parameter in parameters:
        slices.append(slice(start, start + parameter.numel()))
        start += parameter.numel()
    return slices


def _shapes_in(tensors: Any) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a dictionary's tensors; None where it is nothing of the kind."""
    if not isinstance(tensors, Mapping) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        return None
    return {name: tuple(one.shape) for name, one in tensors.items()}
