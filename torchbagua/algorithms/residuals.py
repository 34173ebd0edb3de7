"""The residuals of an algorithm's buckets, kept by parameter: buckets come and go."""

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchbagua.algorithms.accumulation import Accumulation
from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import ResidualPair, TwoPhaseResiduals
from torchbagua.memory_order import flatten_like, shape_like


class ResidualsByParameter:
    """Error feedback of gradient buckets.

    A bucket that takes the place of others, as when DDP rebuilds its buckets or a run is resumed, goes on from the
    residuals of its parameters.

    Of a gradient that was sent, and neither used by a step nor cleared before the next backward pass is synchronised,
    the residual is in what is sent again: then what compression left out the last time is added in its place.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[TwoPhaseResiduals, slice]] = {}  # by the parameter's id
        self._accumulations: dict[int, Accumulation] = {}  # the same
        # Also where the impl is forgotten behind a hook of DDP.
        self._let_go = weakref.finalize(self, _close, self._accumulations)
        self._let_go.atexit = False

    def of_bucket(self, bucket: BaguaBucket) -> TwoPhaseResiduals:
        """Return the error feedback of a new bucket.

        Raises:
            RuntimeError: it has other parameters than the bucket before, of which something was sent that is in the
                gradients that are sent now.
        """
        parameters = [tensor.parameter for tensor in bucket.tensors]
        before = [self._places.get(id(parameter)) for parameter in parameters]
        slices = _consecutive_slices(parameters)
        if before[0] is not None and before == [(before[0][0], part) for part in slices]:
            feedback = before[0][0]  # a bucket of the same parameters
        elif any(place is not None for place in before):
            kept = [tensor.name for tensor in bucket.tensors if self._is_kept(tensor.parameter)]
            if kept:
                raise RuntimeError(
                    f"QAdamAlgorithm: DDP has formed its buckets anew between two synchronised backward passes of one "
                    f"step, as it does once after its first, and with error_feedback what was left out of {kept[0]} in "
                    "the first of them is not known in the other bucket; accumulate gradients under ddp.no_sync()"
                )
            held = [self._held(parameter) for parameter in parameters]
            feedback = TwoPhaseResiduals(bucket.flat.device, ResidualPair(*map(torch.cat, zip(*held, strict=True))))
        else:
            feedback = TwoPhaseResiduals(bucket.flat.device)
        for parameter, part in zip(parameters, slices, strict=True):
            self._places[id(parameter)] = (feedback, part)
            if id(parameter) not in self._accumulations:
                self._accumulations[id(parameter)] = Accumulation(parameter)
        return feedback

    def before_sending(self, bucket: BaguaBucket) -> None:
        """Find out which gradients of a bucket, about to be sent, have in them what was sent of them before.

        Raises:
            RuntimeError: one of them has got nothing since, so that it is not known whether DDP will write to it.
        """
        kept: list[slice] = []
        for tensor in bucket.tensors:
            parameter_id = id(tensor.parameter)
            feedback, part = self._places[parameter_id]
            accumulation = self._accumulations[parameter_id]
            if accumulation.is_alone:
                raise RuntimeError(
                    f"QAdamAlgorithm: with error_feedback, {tensor.name} must have a gradient in every synchronised "
                    "backward pass of a step or in none, got one and then none; accumulate gradients under "
                    "ddp.no_sync()"
                )
            if accumulation.is_kept:
                kept.append(part)
            accumulation.begin()
        feedback.continue_from_staged(kept)

    def end_accumulation(self, bucket: BaguaBucket) -> None:
        """Take note that what is sent next of a bucket has nothing in it of what was sent before."""
        for tensor in bucket.tensors:
            self._accumulations[id(tensor.parameter)].end()

    def close(self) -> None:
        """Let go of the parameters."""
        self._let_go()

    def commit(self, used: Collection[torch.Tensor]) -> None:
        """Commit what is staged of the parameters in `used`; of others nothing that was sent has been used."""
        used_ids = {id(parameter) for parameter in used}
        unused: dict[TwoPhaseResiduals, list[slice]] = {}
        for parameter_id, (feedback, place) in self._places.items():
            parts = unused.setdefault(feedback, [])
            if parameter_id not in used_ids:
                parts.append(place)
        for feedback, parts in unused.items():
            feedback.commit(without=parts)
        for accumulation in self._accumulations.values():
            accumulation.end()

    def state_dict(self, named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what this rank holds, by "sent" and "mean" and by the name of the parameter, in its shape.

        Zeros where there is nothing yet: torch.distributed.checkpoint loads into a state that has all the keys.
        """
        held = {name: self._held(parameter) for name, parameter in named.items()}
        return {
            kind: {name: shape_like(named[name], getattr(both, kind)).clone() for name, both in held.items()}
            for kind in ResidualPair._fields
        }

    def load_state_dict(self, owner: str, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: it holds other names or shapes than those of parameters; names `owner`.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        first, *others = (_shapes_in(state[kind]) for kind in ResidualPair._fields)
        if first is None or any(other != first for other in others) or not first.items() <= shapes.items():
            wrong = [name for name, shape in (first or {}).items() if shapes.get(name) != shape]
            raise ValueError(
                f"{owner}.load_state_dict: {' and '.join(ResidualPair._fields)} must hold tensors of the same names, which "
                f"are parameters of the optimizer, in their shapes, got others{f', {wrong[:5]}' if wrong else ''}"
            )
        self._places = {}
        for accumulation in self._accumulations.values():
            accumulation.end()
        for name in first:
            parameter = named[name]
            held = ResidualPair(
                *(flatten_like(parameter, state[kind][name].float()).clone() for kind in ResidualPair._fields)
            )
            self._places[id(parameter)] = (TwoPhaseResiduals(parameter.device, held), slice(0, parameter.numel()))

    def _is_kept(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._accumulations and self._accumulations[id(parameter)].is_kept

    def _held(self, parameter: torch.Tensor) -> ResidualPair:
        if id(parameter) in self._places:
            feedback, place = self._places[id(parameter)]
            return feedback.expand(place)
        nothing = torch.zeros(parameter.numel(), device=parameter.device)
        return ResidualPair(nothing, nothing)


def _close(accumulations: dict[int, Accumulation]) -> None:
    for accumulation in accumulations.values():
        accumulation.close()


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
