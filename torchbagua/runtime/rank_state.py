"""State that belongs to one rank, and what of it remains when the number of ranks changes.

One rule holds for all algorithms, by the name of a state:

- What this rank owes to the others is its own: the error of what it has sent, and the velocity of what it sends. It
  remains on this rank, and is lost with it. A new rank starts without.
- What depends on the place of a rank among the others starts again: the error of the means that it computes, and its
  copies of its neighbors' weights.
- What is not yet applied to the weights of this rank goes with them.
- All else is equal on all ranks, and remains.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.process_group import BaguaProcessGroup

OF_RANK = frozenset({"sent", "velocity", "error"})
OF_PLACE = frozenset({"mean", "weight", "left", "right"})
OF_WEIGHTS = frozenset({"has_differences", "differences", "buffer_snapshots"})
_OWNER = frozenset({"rank", "num_ranks", "nodes"})
_NESTED = "residuals"


def owner_of(group: BaguaProcessGroup) -> dict[str, int]:
    """Return the owner of a state: a part of the return value of `state_dict`."""
    return {"rank": group.rank, "num_ranks": group.size}


def check_keys(owner: str, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError, which names `owner`, if `state` lacks one of these keys."""
    if not isinstance(state, Mapping) or not state.keys() >= set(keys):
        got = sorted(state) if isinstance(state, Mapping) else repr(state)
        raise ValueError(f"{owner}.load_state_dict: state must have the keys {sorted(keys)}, got {got}")


def check_rank_state(owner: str, state: Mapping[str, Any], keys: Sequence[str], group: BaguaProcessGroup) -> None:
    """Raise ValueError, which names `owner`, if `state` lacks one of these keys or belongs to another rank."""
    own = owner_of(group)
    check_keys(owner, state, [*own, *keys])
    if state["num_ranks"] == own["num_ranks"] and state["rank"] != own["rank"]:
        raise ValueError(
            f"{owner}.load_state_dict: state must be from rank {own['rank']} of {own['num_ranks']}, got a state from "
            f"rank {state['rank']}; every rank saves and loads its own state"
        )


def is_of_other_ranks(state: Mapping[str, Any], group: BaguaProcessGroup) -> bool:
    """Return whether another number of ranks has saved a state."""
    return bool(state["num_ranks"] != group.size)


def continued(owner: str, state: Mapping[str, Any], group: BaguaProcessGroup) -> Mapping[str, Any]:
    """Return what remains of a state by parameter name; with zeros for the rest, and a warning, after a change."""
    if not is_of_other_ranks(state, group):
        return state
    lost = OF_PLACE if state["rank"] == group.rank else OF_PLACE | OF_RANK
    if norm := norm_of(state, lost):
        warn_user(
            f"torchbagua: {owner}.load_state_dict: residuals with a norm of {norm:.3g} start again on rank "
            f"{group.rank}: the state was saved by rank {state['rank']} of {state['num_ranks']}, and {group.size} "
            "ranks are attached"
        )
    zeros = {kind: {name: torch.zeros_like(each) for name, each in state[kind].items()} for kind in lost & state.keys()}
    return {**state, **zeros}


def remaining(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a rank's state that remains on this rank when the ranks change."""
    left_out = OF_PLACE | _OWNER | (frozenset() if state.get("has_differences") else OF_WEIGHTS)
    kept = {name: value for name, value in state.items() if name not in left_out}
    return kept | ({_NESTED: remaining(kept[_NESTED])} if _NESTED in kept else {})


def of_all_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `remaining(state)` that is equal on all ranks."""
    return {name: value for name, value in state.items() if name not in {*OF_RANK, *OF_WEIGHTS, _NESTED}}


def with_remaining(fresh: Mapping[str, Any], remains: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a new attachment with what remains of that of the rank."""
    nested = {_NESTED: with_remaining(fresh[_NESTED], remains[_NESTED])} if _NESTED in remains else {}
    # A single rank has sent nothing.
    kept = {name: value for name, value in remains.items() if name not in OF_RANK or value}
    return {**fresh, **kept, **nested}


def norm_of(state: Mapping[str, Any], kinds: frozenset[str]) -> float:
    """Return the norm of all tensors of some kinds, which are kept by parameter name."""
    every = {**state, **state.get(_NESTED, {})}
    tensors = [tensor for kind in kinds & every.keys() for tensor in every[kind].values()]
    return float(torch.stack([tensor.float().norm() for tensor in tensors] or [torch.zeros(())]).norm())
