"""Weights that optimizers keep in their state, for instance schedule-free's z: averaged with the module's weights."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua._torch import num_writes
from torchbagua._warnings import warn_user
from torchbagua.collectives.broadcast import broadcast_state
from torchbagua.runtime.optimizer_steps import parameters_of, state_of
from torchbagua.runtime.parameters import is_shard, local_shard
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.transport.communicator import Communicator

# The values of parameter groups that belong to the loop and its schedulers: not broadcast.
_OF_SCHEDULERS = {
    *("lr", "initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr"),
    *("momentum", "base_momentum", "max_momentum", "weight_decay"),
}
# The key of a packed DTensor: its shard, sent instead of the DTensor, whose mesh is the sending rank's.
_SHARD = "torchbagua shard"
_NUMBERS = "torchbagua numbers of groups"


def broadcast_optimizer_state(communicator: Communicator, optimizer: torch.optim.Optimizer) -> None:
    """Give all ranks the state of rank 0's `optimizer`, but not its learning rates. Collective.

    Numbers in its parameter groups that it counts or learns, such as Prodigy's `d`, are part of the state.

    A sharded state is sent as rank 0's shard, so all ranks must hold the same shard.
    """
    own = optimizer.state_dict()
    sent = {key: _pack(value) for key, value in own.items() if key != "param_groups"}
    sent[_NUMBERS] = [_numbers(group) for group in optimizer.param_groups]
    state = broadcast_state(communicator, sent, f"the state of {type(optimizer).__name__}")
    numbers = state.pop(_NUMBERS)
    if communicator.rank == 0:
        return
    meshes = {
        index: parameter.device_mesh  # type: ignore[attr-defined]
        for index, parameter in enumerate(parameters_of(optimizer))
        if is_shard(parameter)
    }
    if meshes:  # otherwise the state may have any form
        state["state"] = {key: _unpack(value, meshes.get(key)) for key, value in state["state"].items()}
    optimizer.load_state_dict({**own, **state})
    for group, of_rank_0 in zip(optimizer.param_groups, numbers, strict=True):
        for key, value in of_rank_0.items():
            own_value = group.get(key)
            group[key] = value.to(own_value) if isinstance(own_value, torch.Tensor) else value


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group that an optimizer may have counted or learnt."""
    # Not bools and enumerations, which are options, for instance `foreach`, or the mode of a schedule-free optimizer.
    return {
        key: float(value) if isinstance(value, float) else value  # NumPy's float64, a float, could not be loaded
        for key, value in group.items()
        if (type(value) is int or isinstance(value, float | torch.Tensor)) and key not in _OF_SCHEDULERS
    }


def _pack(value: Any) -> Any:
    """Return nested dicts, lists and tuples with every DTensor replaced by a dict that `_unpack` takes."""
    if isinstance(value, dict):
        return {key: _pack(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_pack, value))
    if isinstance(value, torch.Tensor) and is_shard(value):
        placements = value.placements  # type: ignore[attr-defined]
        return {_SHARD: local_shard(value), "placements": placements, "shape": value.shape, "stride": value.stride()}
    return value


def _unpack(value: Any, mesh: Any) -> Any:
    if isinstance(value, dict):
        if _SHARD in value:
            from torch.distributed.tensor import DTensor  # takes a second, unless it was imported before

            layout = {key: value[key] for key in ("placements", "shape", "stride")}
            return DTensor.from_local(value[_SHARD], mesh, run_check=False, **layout)
        return {key: _unpack(child, mesh) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unpack(child, mesh) for child in value)
    return value


# Keys of an optimizer's groups, and attributes, that tell whether the module has training or evaluation weights.
_MODE = re.compile("mode|train|eval")


@dataclass(frozen=True)
class _Place:
    """The place in an optimizer's state of the tensor `name` of a parameter. Ranks have the same places."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    name: str

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, or None if the optimizer has not stepped the parameter."""
        found = state_of(self.optimizer).get(self.parameter, {}).get(self.name)
        return found if isinstance(found, torch.Tensor) and found.shape == self.parameter.shape else None

    def put(self, value: torch.Tensor | None) -> None:
        """Replace the tensor, or remove it."""
        state = state_of(self.optimizer)
        if value is not None:
            state[self.parameter][self.name] = value
            return
        del state[self.parameter][self.name]
        if not state[self.parameter]:  # most optimizers initialize an empty state in the next step
            del state[self.parameter]


class OptimizerWeights:
    """The state tensors of attached optimizers that hold weights, and the mode of optimizers with `train` and `eval`.

    The tensors of schedule-free optimizers and of ASGD are known; others are added by name. They are averaged with the
    module's weights for an evaluation and at the end. In the rounds of the algorithm they remain each rank's own.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], runner: WeightRunner) -> None:
        self._runner = runner
        can_average = runner.weights is not None
        self._names = {optimizer: _known_names(optimizer) if can_average else () for optimizer in optimizers}
        self._added: set[tuple[torch.optim.Optimizer, str]] = set()
        self._taken: list[tuple[_Place, torch.Tensor]] = []
        self._modes: dict[torch.optim.Optimizer, dict[Any, Any]] = {}  # at the start of `averaged`
        # Within `averaged`, of optimizers whose `eval` would be noticed by these only: the writes to their parameters.
        self._writes: dict[torch.optim.Optimizer, int] = {}
        # Within `averaged`: each place with its tensor outside of `averaged`, and its tensor inside.
        self._exchanged: list[tuple[_Place, torch.Tensor | None, torch.Tensor | None]] = []

    def names(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Return the names of the state tensors of `optimizer` that are averaged."""
        return self._names[optimizer]

    def add(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Average the state tensor `name` of each parameter of `optimizer` too. All ranks must add the same."""
        if optimizer not in self._names:
            raise ValueError(
                f"average_also: the {type(optimizer).__name__} is not attached; pass an optimizer that attach was given"
            )
        if self._runner.weights is None:
            raise NotImplementedError(f"average_also: {type(self._runner.impl).__name__} must call runner.average")
        places = [_Place(optimizer, parameter, name) for parameter in parameters_of(optimizer)]
        if state_of(optimizer) and all(place.tensor() is None for place in places):
            raise ValueError(_explain_missing(optimizer, name))
        if name not in self._names[optimizer]:
            self._names[optimizer] += (name,)
            self._added.add((optimizer, name))

    @contextmanager
    def averaged(self, module_mean: AbstractContextManager[None]) -> Iterator[None]:
        """Within the context, have the mean over the ranks in the state too. Collective on entry.

        After it, every optimizer has its own state again. If its mode was changed within the context, it still has the
        new mode, with this rank's own weights.
        """
        taken = self._take()
        modes = {optimizer: _mode_of(optimizer) for optimizer in self._names if _has_modes(optimizer)}
        to_redo: list[Callable[[], Any]] = []
        try:
            with module_mean:
                means = self._average(taken)
                taken.clear()
                self._exchanged = [(place, place.tensor(), mean) for place, mean in means]
                self._modes = modes
                self._exchange()
                unsure = [optimizer for optimizer, mode in modes.items() if not mode or not self._names[optimizer]]
                self._writes = {optimizer: _num_writes(optimizer) for optimizer in unsure}
                try:
                    yield
                finally:
                    try:
                        written = [each for each, number in self._writes.items() if _num_writes(each) != number]
                        to_redo = self._undo_modes()
                        for optimizer in written:
                            _warn_of_mode(optimizer)
                    finally:
                        self._exchange()
                        self._exchanged, self._modes, self._writes = [], {}, {}
        finally:
            for redo in to_redo:
                redo()

    @contextmanager
    def own(self, module_own: AbstractContextManager[None]) -> Iterator[None]:
        """Within `averaged`, have this rank's own state in a nested context, in the optimizers' current modes."""
        writes = {optimizer: _num_writes(optimizer) for optimizer in self._writes}
        changed = [optimizer for optimizer, mode in self._modes.items() if _mode_of(optimizer) != mode]
        weights = [local_shard(parameter) for optimizer in changed for parameter in parameters_of(optimizer)]
        values = [weight.detach().clone() for weight in weights]
        to_redo = self._undo_modes()
        with module_own:
            self._exchange()
            for redo in to_redo:
                redo()
            try:
                yield
            finally:
                self._undo_modes()
                self._exchange()
        for redo in to_redo:
            redo()
        with torch.no_grad():
            for weight, value in zip(weights, values, strict=True):
                weight.copy_(value)  # exactly, although a change of modes rounds
        for optimizer, number in writes.items():
            self._writes[optimizer] += _num_writes(optimizer) - number

    def before_end(self) -> None:
        """Prepare for `average`. Call it before the last mean of the module."""
        self._taken = self._take()

    @torch.no_grad()
    def average(self) -> None:
        """Replace the tensors by their mean over the ranks. Collective. Call it after the last mean of the module."""
        for place, mean in self._average(self._taken):
            if (own := place.tensor()) is not None:
                local_shard(own).copy_(local_shard(mean))
        self._taken = []

    @torch.no_grad()
    def _take(self) -> list[tuple[_Place, torch.Tensor]]:
        """Return all places with this rank's values.

        A parameter that this rank has not stepped has no tensor: its weights are the value, copied here because they
        are about to be averaged.
        """
        taken = []
        for optimizer, names in self._names.items():
            for name in names:
                for parameter in parameters_of(optimizer):
                    place = _Place(optimizer, parameter, name)
                    value = place.tensor()
                    if value is None:
                        value = parameter.clone() if parameter.requires_grad else parameter
                    taken.append((place, value))
        return taken

    @torch.no_grad()
    def _average(self, taken: Sequence[tuple[_Place, torch.Tensor]]) -> list[tuple[_Place, torch.Tensor]]:
        """Return the means over the ranks, of the places in which some rank has a tensor. Collective if any place is.

        Call it if `WeightMeans.average_tensors` may be called.
        """
        if not taken:
            return []
        assert self._runner.weights is not None
        means = self._runner.weights.means
        has_tensor = [float(place.tensor() is not None) for place, _ in taken]
        shares = torch.tensor(has_tensor, device=taken[0][1].device)
        means.average_tensors([shares], "which parameters have weights in the optimizers' state")
        kept = [(place, own.clone()) for (place, own), share in zip(taken, shares.tolist(), strict=True) if share]
        means.average_tensors([local_shard(value) for _, value in kept], "the weights in the optimizers' state")
        found = {(place.optimizer, place.name) for place, _ in kept}
        for optimizer, name in sorted(self._added - found, key=lambda added: added[1]):
            if state_of(optimizer):
                self._added.remove((optimizer, name))
                warn_user(f"torchbagua: {_explain_missing(optimizer, name)}")
        return kept

    def _exchange(self) -> None:
        """Exchange this rank's tensors for the means, or back, unless the user has replaced them."""
        for place, out, into in self._exchanged:
            if place.tensor() is out:
                place.put(into)
        self._exchanged = [(place, into, out) for place, out, into in self._exchanged]

    def _undo_modes(self) -> list[Callable[[], Any]]:
        """Return every optimizer to its mode at the start of `averaged`; return the calls that undo this."""
        to_redo: list[Callable[[], Any]] = []
        for optimizer, mode in self._modes.items():
            if _mode_of(optimizer) == mode:
                continue
            train, evaluate = optimizer.train, optimizer.eval  # type: ignore[attr-defined]
            train()
            if _mode_of(optimizer) == mode:
                to_redo.append(evaluate)
                continue
            evaluate()
            if _mode_of(optimizer) == mode:
                to_redo.append(train)
            else:
                _warn_of_mode(optimizer)
        return to_redo


def _known_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the state tensors of an optimizer of a known class that hold weights."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.split(".")[0] == "schedulefree" or "ScheduleFree" in cls.__name__:
            return ("x", "y", "z") if "Reference" in cls.__name__ else ("z",)
    return ("ax",) if isinstance(optimizer, torch.optim.ASGD) else ()


def _has_modes(optimizer: torch.optim.Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _mode_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the values in which an optimizer's `train` and `eval` note the mode; empty if it is kept elsewhere."""
    owners: list[Mapping[str, Any]] = [vars(optimizer), *optimizer.param_groups]
    return {
        (index, key): value
        for index, owner in enumerate(owners)
        for key, value in owner.items()
        if isinstance(value, bool | int | str) and _MODE.search(key)
    }


def _num_writes(optimizer: torch.optim.Optimizer) -> int:
    return sum(num_writes(local_shard(parameter)) for parameter in parameters_of(optimizer))


def _warn_of_mode(optimizer: torch.optim.Optimizer) -> None:
    warn_user(
        f"torchbagua: weights were changed within averaged_weights, as eval() of {type(optimizer).__name__} does, but "
        "its state is not averaged, or its mode is unknown: ranks may have evaluated different weights, and train() "
        "after the block may change the training. Call eval() before the block and train() after it, or call "
        "average_also(optimizer, name) for the state tensors that hold weights"
    )


def _explain_missing(optimizer: torch.optim.Optimizer, name: str) -> str:
    known = dict.fromkeys(
        key
        for parameter, state in state_of(optimizer).items()
        if isinstance(parameter, torch.Tensor)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )
    return (
        f"average_also: no parameter of {type(optimizer).__name__} has a state tensor {name!r} with its shape; such "
        f"tensors are {', '.join(map(str, known)) or 'none'}"
    )
