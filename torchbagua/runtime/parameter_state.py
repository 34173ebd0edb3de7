"""Per-parameter state: an algorithm's state between steps, staged by a backward and committed by its step.

The state of a parameter outlives DDP's buckets, which change when DDP rebuilds them or a run is resumed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from torchbagua import _concurrency
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Momentum
from torchbagua.runtime.averaged_gradients import AverageInGradient, has_average, parameters_with_average
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameters import MemoryOrder, flat_length, local_shard


@runtime_checkable
class UnstagingState(Protocol):
    """A `BucketState` that can revert its staged values, element by element."""

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Replace the staged values by the committed ones for elements whose `is_used_N`, [N] bool, is False."""
        ...


def can_unstage(state: object, parameter: torch.Tensor) -> bool:
    """Return whether the device decides if a step commits the state of `parameter`, since a host read would block."""
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.numel() > 0
        and requires_host_sync(gradient)
        and isinstance(state, UnstagingState)
    )


def requires_host_sync(tensor: torch.Tensor) -> bool:
    """Return whether the host blocks on the device when it reads a value of `tensor`."""
    return not tensor.is_cpu


def unstage_unused(averages: Mapping[torch.Tensor, torch.Tensor], places: Mapping[int, tuple[object, slice]]) -> None:
    """Unstage the state of parameters with gradients that do not contain the average."""
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
    """Return for each element of a bucket the flag of its parameter, or True for a parameter without a flag.

    The staged values of parameters without a flag remain staged, since a later step may commit them.
    """
    default = torch.ones_like(next(iter(flags.values())))
    in_order = sorted(parts, key=lambda place: (place[0].start, place[0].stop))
    return torch.cat([flags.get(number, default).expand(part.stop - part.start) for part, number in in_order])


class BucketState(Protocol):
    """The state of the parameters of one bucket: committed tensors, and staged tensors that will replace them.

    A slice selects elements of the bucket: the elements of one parameter, or of several consecutive parameters.
    """

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare for the next backward.

        In `parts`, the gradients still contain averages with staged state. There, the next staging starts from the
        staged state. Elsewhere it starts from the committed state.
        """
        ...

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Replace the committed state of `parts`, by default of all, by the staged state, if there is any."""
        ...

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        """Return this rank's state of one parameter, flat, with zeros for the elements that other ranks store.

        If the state is distributed over the ranks, a new state that starts from this one sums it over the ranks.
        """
        ...


S = TypeVar("S", bound=BucketState)
ShapeOf = Callable[[torch.Tensor], Sequence[int]]


class ParameterState(Generic[S]):
    """An algorithm's state for each parameter, in named tensors: residuals, or a low-rank factor.

    An impl passes a ParameterState to `Runner.keep`, and gets the state of a bucket from `of_bucket`. To the operations
    of the bucket it appends `resolve_last_backward`, before the operations that stage state. Steps that are taken
    commit the staged state, and `Runner.state_dict` contains the committed state.

    A gradient may have been sent, and neither used by a step nor cleared before the next synchronized backward pass. It
    is then sent again, and already includes the staged state. The state of the bucket therefore starts from the staged
    state, see `BucketState.continue_from_staged`.

    Args:
        owner: the name of the algorithm, for errors.
        make: a function that returns the state of a new bucket. Its arguments are the bucket and, for each parameter,
            this rank's state, as `BucketState.expand` returns it. The second argument is None if no rank has any state
            of the bucket's parameters.
        shapes: the names of the tensors, in the order of `BucketState.expand`. Each name maps to a function of the
            parameter that returns the shape, or to None for one float32 (or complex64) value per element, in the order
            of the parameter's memory.
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
        # All keyed by the parameter's id. Loaded tensors are stored until the parameter is first in a bucket.
        self._places: dict[int, tuple[S, slice]] = {}
        self._loaded: dict[int, Sequence[torch.Tensor]] = {}
        self._orders: dict[int, MemoryOrder] = {}  # the order in which the state is stored
        self._averages: dict[int, AverageInGradient] = {}
        # Also runs if the runner is garbage-collected together with a DDP hook, without a call of close.
        self._finalizer = _concurrency.finalize(self, _close, self._averages)
        self._finalizer.atexit = False

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._shapes)

    def of_bucket(self, bucket: BaguaBucket) -> S:
        """Return the state of a new bucket, which starts from the state of its parameters.

        Raises:
            RuntimeError: DDP has rebuilt its buckets between two synchronized backward passes of one step.
        """
        parameters = [tensor.parameter for tensor in bucket.tensors]
        slices = _consecutive_slices(parameters)
        places = [self._places.get(id(parameter)) for parameter in parameters]
        if places[0] is not None and places == [(places[0][0], part) for part in slices]:
            known = places[0][0]
            if sum(state is known for state, _ in self._places.values()) == len(parameters):
                return known  # a bucket with the same parameters, not one with only the first of them
        unresolved = [tensor.name for tensor in bucket.tensors if self._is_still_in_gradient(tensor.parameter)]
        if unresolved:
            raise RuntimeError(
                f"{self._owner}: DDP has rebuilt its buckets between two synchronized backward passes of one step, as "
                f"it does once after its first backward. The new bucket has no state of the parameter {unresolved[0]} "
                "from the first pass. Accumulate gradients under ddp.no_sync(), and clear the gradients of parameters "
                "that no optimizer has with ddp.zero_grad()"
            )
        is_new = not any(id(parameter) in known for parameter in parameters for known in (self._places, self._loaded))
        state = self._make(bucket, None if is_new else [self._local_state(parameter) for parameter in parameters])
        for tensor, part in zip(bucket.tensors, slices, strict=True):
            parameter = tensor.parameter
            self._orders[id(parameter)] = tensor.order
            self._places[id(parameter)] = (state, part)
            self._loaded.pop(id(parameter), None)
            if id(parameter) not in self._averages:
                self._averages[id(parameter)] = AverageInGradient(parameter)
        return state

    def resolve_last_backward(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        """Determine which gradients of a bucket contain an earlier average. Append it with `append_local_op`.

        Raises:
            RuntimeError: a parameter was in a synchronized backward pass of this step, and is not in this pass.
        """
        unused: list[slice] = []
        for tensor in bucket.tensors:
            average, place = self._averages[id(tensor.parameter)], self._places[id(tensor.parameter)][1]
            if average.is_untouched_in_gradient:
                raise RuntimeError(
                    f"{self._owner}: {tensor.name} must have a gradient in every synchronized backward pass of a step "
                    "or in none, got a gradient in an earlier pass only; accumulate gradients under ddp.no_sync()"
                )
            if average.is_still_in_gradient:
                unused.append(place)
            average.begin(bucket.flat[place])
        self._places[id(bucket.tensors[0].parameter)][0].continue_from_staged(unused)

    def commit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Commit the staged state, after a step of these parameters, if their gradients contain an average.

        The staged state of the other parameters remains staged, since the step has not used their averages.
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
        used_ids = {id(parameter) for parameter in (*unread, *parameters_with_average(read))}
        by_state: dict[int, tuple[S, list[slice], list[slice]]] = {}
        for parameter_id, (state, part) in self._places.items():
            _, taken, left = by_state.setdefault(id(state), (state, [], []))
            if part.start < part.stop:
                (taken if parameter_id in used_ids else left).append(part)
        for state, taken, left in by_state.values():
            if taken:
                state.commit(_merge_adjacent(taken) if left else None)
        for parameter_id in used_ids:
            self._averages[parameter_id].end()

    def commit_without_step(self, bucket: BaguaBucket) -> None:
        """Commit the staged state of a bucket on a rank that takes no steps (`torch.distributed.algorithms.Join`).

        Commit nothing if the average is not finite, since the other ranks then skip the step.
        """
        for tensor in bucket.tensors:
            self._averages[id(tensor.parameter)].end()
        if bool(bucket.flat.isfinite().all()):
            self._places[id(bucket.tensors[0].parameter)][0].commit()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._finalizer()

    def state_dict(self, named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's state, keyed by tensor name and then by parameter name.

        A parameter without state has zeros, since torch.distributed.checkpoint loads into a state that has all keys.
        """
        local = {name: self._local_state(parameter) for name, parameter in named.items()}
        return {
            kind: {name: self._to_shape(named[name], tensors[index], shape_of) for name, tensors in local.items()}
            for index, (kind, shape_of) in enumerate(self._shapes.items())
        }

    def load_state_dict(self, owner: str, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Load the return value of `state_dict`. Then call `AlgorithmImpl.reset`, so that buckets get the new state.

        Args:
            owner: the name for errors.
            state: the return value of `state_dict`.
            named: the parameters, by name.

        Raises:
            ValueError: names or shapes do not match the parameters.
        """
        names: list[Any] = []
        wrong: dict[str, None] = {}
        for kind, shape_of in self._shapes.items():
            tensors = state[kind] if isinstance(state[kind], Mapping) else {"": state[kind]}
            names.append(tensors.keys())
            wrong |= {name: None for name, tensor in tensors.items() if not _fits(tensor, named.get(name), shape_of)}
        if wrong or any(keys != names[0] for keys in names):
            raise ValueError(
                f"{owner}.load_state_dict: {' and '.join(self._shapes)} must contain tensors with the names and shapes "
                "of the parameters, got others" + (f": {list(wrong)[:5]}" if any(wrong) else "")
            )
        self._places = {}
        for average in self._averages.values():
            average.end()
        self._loaded = {
            id(named[name]): [
                self._to_flat(named[name], state[kind][name], shape_of) for kind, shape_of in self._shapes.items()
            ]
            for name in names[0]
        }

    def _is_still_in_gradient(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._averages and self._averages[id(parameter)].is_still_in_gradient

    def _local_state(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        if id(parameter) in self._places:
            state, part = self._places[id(parameter)]
            return state.expand(part)
        if id(parameter) in self._loaded:
            return self._loaded[id(parameter)]
        shapes = [[flat_length(parameter)] if of is None else of(parameter) for of in self._shapes.values()]
        return [torch.zeros(math.prod(shape), device=parameter.device) for shape in shapes]

    def _order_of(self, parameter: torch.Tensor) -> MemoryOrder:
        return self._orders.setdefault(id(parameter), MemoryOrder(parameter))

    def _to_shape(self, parameter: torch.Tensor, flat: torch.Tensor, shape_of: ShapeOf | None) -> torch.Tensor:
        """Return a copy of a state tensor of `parameter` in its shape."""
        copy = flat.clone()
        return self._order_of(parameter).shape(copy) if shape_of is None else copy.view(*shape_of(parameter))

    def _to_flat(self, parameter: torch.Tensor, shaped: torch.Tensor, shape_of: ShapeOf | None) -> torch.Tensor:
        """Return a flat copy of a state tensor; the inverse of `_to_shape`."""
        if shape_of is not None:
            return shaped.to(parameter.device, torch.float32).flatten().clone()
        dtype = torch.complex64 if parameter.is_complex() else torch.float32
        flat = self._order_of(parameter).flatten(shaped.to(parameter.device, dtype)).clone()
        return torch.view_as_real(flat).view(-1) if parameter.is_complex() else flat


def residual_state(owner: str, momentum: Momentum | None = None) -> ParameterState[TwoPhaseResiduals]:
    """Return the residuals of error feedback for `BaguaBucket.append_centralized_synchronous_op`.

    Args:
        owner: the name of the algorithm, for errors.
        momentum: the momentum of the values that are sent. The state then includes its velocity.
    """
    names = list(TwoPhaseResiduals(torch.device("cpu"), momentum=momentum).kept)

    def make(bucket: BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> TwoPhaseResiduals:
        whole = None if held is None else dict(zip(names, map(torch.cat, zip(*held, strict=True)), strict=True))
        return TwoPhaseResiduals(bucket.flat.device, whole, momentum)

    return ParameterState(f"{owner} with error_feedback", make, dict.fromkeys(names))


def _close(averages: dict[int, AverageInGradient]) -> None:
    for average in averages.values():
        average.close()


def _consecutive_slices(parameters: Iterable[torch.Tensor]) -> list[slice]:
    slices, start = [], 0
    for parameter in parameters:
        slices.append(slice(start, start + flat_length(parameter)))
        start = slices[-1].stop
    return slices


def _merge_adjacent(parts: Sequence[slice]) -> list[slice]:
    """Return the same elements in fewer slices, with adjacent slices merged."""
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
