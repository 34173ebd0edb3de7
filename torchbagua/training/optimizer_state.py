"""The state of an optimizer that rank 0 gives to all others, each its own shards of it."""

from typing import Any

import torch

from torchbagua.collectives.broadcast import broadcast_state
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.shards import is_shard, local_shard
from torchbagua.transport.communicator import Communicator

# In the place of a DTensor, whose mesh is that of the rank that sends it: its shard, and how it is made of shards.
_SHARD = "torchbagua shard"


def broadcast_optimizer_state(communicator: Communicator, optimizer: torch.optim.Optimizer) -> None:
    """Give all ranks the state of rank 0's `optimizer`, but not its learning rates. Collective.

    Of what is sharded each rank gets a shard, so all of them hold the same one.

    Raises:
        CommunicationError: a peer is gone or did not take part within the group's timeout.
    """
    # Not its groups: learning rates belong to the loop, and to its schedulers.
    own = optimizer.state_dict()
    sent = {key: _packed(value) for key, value in own.items() if key != "param_groups"}
    state = broadcast_state(communicator, sent, f"the state of {type(optimizer).__name__}")
    if communicator.rank == 0:
        return
    meshes = {
        index: one.device_mesh  # type: ignore[attr-defined]
        for index, one in enumerate(parameters_of(optimizer))
        if is_shard(one)
    }
    if meshes:  # else the state may be of any form
        state["state"] = {key: _unpacked(value, meshes.get(key)) for key, value in state["state"].items()}
    optimizer.load_state_dict({**own, **state})


def _packed(value: Any) -> Any:
    """Return nested dicts, lists and tuples with every DTensor replaced by what `_unpacked` takes."""
    if isinstance(value, dict):
        return {key: _packed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_packed, value))
    if isinstance(value, torch.Tensor) and is_shard(value):
        placements = value.placements  # type: ignore[attr-defined]
        return {_SHARD: local_shard(value), "placements": placements, "shape": value.shape, "stride": value.stride()}
    return value


def _unpacked(value: Any, mesh: Any) -> Any:
    if isinstance(value, dict):
        if _SHARD in value:
            from torch.distributed.tensor import DTensor  # which takes a second, unless there is one already

            kinds = {key: value[key] for key in ("placements", "shape", "stride")}
            return DTensor.from_local(value[_SHARD], mesh, run_check=False, **kinds)
        return {key: _unpacked(one, mesh) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unpacked(one, mesh) for one in value)
    return value
