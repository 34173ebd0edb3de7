"""Broadcasts rank 0's optimizer state, or its shard of a sharded state, to all ranks."""

from typing import Any

import torch

from torchbagua.collectives.broadcast import broadcast_state
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.shards import is_shard, local_shard
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

    Raises:
        CommunicationError: a peer died or did not take part within the group's timeout.
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
