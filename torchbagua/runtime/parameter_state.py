"""State by parameter: what an algorithm keeps from one step to the next, staged by a backward, committed by its step.

DDP's buckets come and go, when it rebuilds them or a run is resumed; what is kept of a parameter stays.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Momentum
from torchbagua.runtime.averaged_gradients import AverageInGradient, with_average
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.memory_order import MemoryOrder, flat_length
from torchbagua.runtime.shards import local_shard
from torchbagua.runtime.unstaging import can_unstage, unstage_unused


class BucketState(Protocol):
    """What is kept of the parameters of one bucket: tensors, and what a backward stages to replace them.

    A slice selects elements of the bucket: those of one parameter, or of several that lie one after the other.
    """

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare for the next backward.

        In `parts`, the gradients still contain averages for which something is staged. There, the next staging starts
        from what is staged. Elsewhere it starts from what was committed.
        """
        ...

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Replace what is kept of `parts`, by default of all, by what is staged. Do nothing if nothing is staged."""
        ...

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        """Return what this rank holds of one parameter, flat, with zeros for what other ranks hold.

        If the ranks share it, a new state that starts from it sums it over the ranks.
        """
        ...


S = TypeVar("S", bound=BucketState)
ShapeOf = Callable[[torch.Tensor], Sequence[int]]


class ParameterState(Generic[S]):
    """What an algorithm keeps of each parameter, in named tensors: residuals, or a factor of low rank.

    An impl passes one to `Runner.keep`, and gets the state of a bucket from `of_bucket`. To the operations of the
    bucket it appends `resolve_last_backward`, before those that stage something. Steps that are taken commit what is
    staged, and `Runner.state_dict` contains what is kept.

    A gradient may have been sent, and neither used by a step nor cleared before the next synchronised backward pass. It
    is then sent again, and what was staged is in it already. The state of the bucket starts from there, see
    `BucketState.continue_from_staged`.

    Args:
        owner: the name of the algorithm, for errors.
        make: a function that returns the state of a new bucket. Its arguments are the bucket, and for each parameter
            what this rank holds, as `BucketState.expand` returns it. The second one is None if no rank holds anything
            of the bucket's parameters.
        shapes: the names of the tensors, in the order of `BucketState.expand`. With each goes a function of the
            parameter that returns the shape; or None for one float32 (or complex64) value for each element, in the
            order of the parameter's memory.
    """

    def __init__(
        self,
        owner: str,
        make: Callable[[BaguaBucket, Sequence[Sequence[torch.Tensor]] | None], S],
        shapes: Mapping[str, ShapeOf | None],
    ) -> None:
        self._owner = owner
        self._make = make
        self._shapes = shapes
        # All by the parameter's id. What is loaded is kept until the parameter is seen in a bucket.
        self._places: dict[int, tuple[S, slice]] = {}
        self._loaded: dict[int, Sequence[torch.Tensor]] = {}
        self._orders: dict[int, MemoryOrder] = {}  # in which what is kept lies
        self._averages: dict[int, AverageInGradient] = {}
        # Also if the runner is forgotten behind a hook of DDP.
        self._let_go = weakref.finalize(self, _close, self._averages)
        self._let_go.atexit = False

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._shapes)

    def of_bucket(self, bucket: BaguaBucket) -> S:
        """Return the state of a new bucket, which starts from what is kept of its parameters.

        Raises:
            RuntimeError: DDP has formed its buckets anew between two synchronised backward passes of one step.
        """
        parameters = [tensor.parameter for tensor in bucket.tensors]
        slices = _consecutive_slices(parameters)
        places = [self._places.get(id(parameter)) for parameter in parameters]
        if places[0] is not None and places == [(places[0][0], part) for part in slices]:
            known = places[0][0]
            if sum(state is known for state, _ in self._places.values()) == len(parameters):
                return known  # a bucket of the same parameters, and not of the first ones of another
        unresolved = [tensor.name for tensor in bucket.tensors if self._is_still_in_gradient(tensor.parameter)]
        if unresolved:
            raise RuntimeError(
                f"{self._owner}: DDP has formed its buckets anew between two synchronised backward passes of one "
                f"step, as it does once after its first, and what was kept of {unresolved[0]} in the first of them is "
                "not known in the other bucket; accumulate gradients under ddp.no_sync(), and clear those "
                "of parameters that no optimizer has with ddp.zero_grad()"
            )
        is_new = not any(id(parameter) in known for parameter in parameters for known in (self._places, self._loaded))
        state = self._make(bucket, None if is_new else [self._held(parameter) for parameter in parameters])
        for tensor, part in zip(bucket.tensors, slices, strict=True):
            parameter = tensor.parameter
            self._orders[id(parameter)] = tensor.order
            self._places[id(parameter)] = (state, part)
            self._loaded.pop(id(parameter), None)
            if id(parameter) not in self._averages:
                self._averages[id(parameter)] = AverageInGradient(parameter)
        return state

    def resolve_last_backward(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        """Find out which gradients of a bucket contain what was sent before. A python op, to append before sending.

        Raises:
            RuntimeError: a parameter was in a synchronised backward pass of this step, and is not in this one.
        """
        still_there: list[slice] = []
        for tensor in bucket.tensors:
            average, place = self._averages[id(tensor.parameter)], self._places[id(tensor.parameter)][1]
            if average.is_untouched_in_gradient:
                raise RuntimeError(
                    f"{self._owner}: {tensor.name} must have a gradient in every synchronised backward pass of a step "
                    "or in none, got one and then none; accumulate gradients under ddp.no_sync()"
                )
            if average.is_still_in_gradient:
                still_there.append(place)
            average.begin(bucket.flat[place])
        self._places[id(bucket.tensors[0].parameter)][0].continue_from_staged(still_there)

    def commit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Commit what is staged, after a step of these parameters, for those whose gradient holds an average.

        What is staged for the others stays: nothing that was sent of them has been used.
        """
        pending = {
            parameter: average
            for parameter in parameters
            if id(parameter) in self._places and (average := self._averages[id(parameter)].pending) is not None
        }
        unread = {
            parameter: average
            for parameter, average in pending.items()
            if can_unstage(self._places[id(parameter)][0], parameter)
        }
        unstage_unused(unread, self._places)
        read = {parameter: average for parameter, average in pending.items() if parameter not in unread}
        used_ids = {id(parameter) for parameter in (*unread, *with_average(read))}
        by_state: dict[int, tuple[S, list[slice], list[slice]]] = {}
        for parameter_id, (state, part) in self._places.items():
            _, taken, left = by_state.setdefault(id(state), (state, [], []))
            if part.start < part.stop:
                (taken if parameter_id in used_ids else left).append(part)
        for state, taken, left in by_state.values():
            if taken:
                state.commit(_merged(taken) if left else None)
        for parameter_id in used_ids:
            self._averages[parameter_id].end()

    def commit_without_step(self, bucket: BaguaBucket) -> None:
        """Commit what is staged of a bucket on a rank that takes no steps (`torch.distributed.algorithms.Join`).

        Nothing is committed if the average is not finite: the other ranks then skip the step.
        """
        for tensor in bucket.tensors:
            self._averages[id(tensor.parameter)].end()
        if bool(bucket.flat.isfinite().all()):
            self._places[id(bucket.tensors[0].parameter)][0].commit()

    def close(self) -> None:
        """Let go of the parameters."""
        self._let_go()

    def state_dict(self, named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what this rank holds, by the name of the tensor and then by that of the parameter.

        There are zeros where nothing is kept yet, since torch.distributed.checkpoint loads into a state that has all
        keys.
        """
        held = {name: self._held(parameter) for name, parameter in named.items()}
        return {
            kind: {name: self._shaped(named[name], tensors[index], shape_of) for name, tensors in held.items()}
            for index, (kind, shape_of) in enumerate(self._shapes.items())
        }

    def load_state_dict(self, owner: str, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Load what `state_dict` returned. Then call `AlgorithmImpl.reset`, so that buckets ask for their state again.

        Args:
            owner: whom the error names.
            state: what `state_dict` returned.
            named: the parameters, by name.

        Raises:
            ValueError: names or shapes are not those of the parameters.
        """
        names: list[Any] = []
        wrong: dict[str, None] = {}
        for kind, shape_of in self._shapes.items():
            tensors = state[kind] if isinstance(state[kind], Mapping) else {"": state[kind]}
            names.append(tensors.keys())
            wrong |= {name: None for name, one in tensors.items() if not _fits(one, named.get(name), shape_of)}
        if wrong or any(one != names[0] for one in names):
            raise ValueError(
                f"{owner}.load_state_dict: {' and '.join(self._shapes)} must hold tensors of the same names, which are "
                "those of its parameters, in their shapes, got others" + (f", {list(wrong)[:5]}" if any(wrong) else "")
            )
        self._places = {}
        for one in self._averages.values():
            one.end()
        self._loaded = {
            id(named[name]): [
                self._flat(named[name], state[kind][name], shape_of) for kind, shape_of in self._shapes.items()
            ]
            for name in names[0]
        }

    def _is_still_in_gradient(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._averages and self._averages[id(parameter)].is_still_in_gradient

    def _held(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        if id(parameter) in self._places:
            state, part = self._places[id(parameter)]
            return state.expand(part)
        if id(parameter) in self._loaded:
            return self._loaded[id(parameter)]
        shapes = [[flat_length(parameter)] if of is None else of(parameter) for of in self._shapes.values()]
        return [torch.zeros(math.prod(shape), device=parameter.device) for shape in shapes]

    def _order_of(self, parameter: torch.Tensor) -> MemoryOrder:
        return self._orders.setdefault(id(parameter), MemoryOrder(parameter))

    def _shaped(self, parameter: torch.Tensor, flat: torch.Tensor, shape_of: ShapeOf | None) -> torch.Tensor:
        """Return what is kept of `parameter` in its shape, a copy."""
        copy = flat.clone()
        return self._order_of(parameter).shape(copy) if shape_of is None else copy.view(*shape_of(parameter))

    def _flat(self, parameter: torch.Tensor, shaped: torch.Tensor, shape_of: ShapeOf | None) -> torch.Tensor:
        """Return the reverse of `_shaped`."""
        if shape_of is not None:
            return shaped.to(parameter.device, torch.float32).flatten().clone()
        dtype = torch.complex64 if parameter.is_complex() else torch.float32
        flat = self._order_of(parameter).flatten(shaped.to(parameter.device, dtype)).clone()
        return torch.view_as_real(flat).view(-1) if parameter.is_complex() else flat


def residual_state(owner: str, momentum: Momentum | None = None) -> ParameterState[TwoPhaseResiduals]:
    """Return the residuals of error feedback for `BaguaBucket.append_centralized_synchronous_op`.

    Args:
        owner: the name of the algorithm, for errors.
        momentum: of what is sent, whose velocity is then kept too.
    """
    names = list(TwoPhaseResiduals(torch.device("cpu"), momentum=momentum).kept)

    def make(bucket: BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> TwoPhaseResiduals:
        whole = None if held is None else dict(zip(names, map(torch.cat, zip(*held, strict=True)), strict=True))
        return TwoPhaseResiduals(bucket.flat.device, whole, momentum)

    return ParameterState(f"{owner} with error_feedback", make, dict.fromkeys(names))


def _close(averages: dict[int, AverageInGradient]) -> None:
    for one in averages.values():
        one.close()


def _consecutive_slices(parameters: Iterable[torch.Tensor]) -> list[slice]:
    slices, start = [], 0
    for parameter in parameters:
        slices.append(slice(start, start + flat_length(parameter)))
        start = slices[-1].stop
    return slices


def _merged(parts: Sequence[slice]) -> list[slice]:
    """Return the same elements in fewer slices, where some lie one after the other."""
    merged: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        if merged and merged[-1].stop == part.start:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


def _fits(tensor: object, parameter: torch.Tensor | None, shape_of: ShapeOf | None) -> bool:
    if parameter is None or not isinstance(tensor, torch.Tensor):
        return False
    return list(tensor.shape) == list(local_shard(parameter).shape if shape_of is None else shape_of(parameter))
