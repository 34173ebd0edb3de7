"""State that belongs to one rank, and that any other rank rejects."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchbagua.collectives.process_group import BaguaProcessGroup


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
    subject = f"{owner}.load_state_dict: state must"
    given = {name: state[name] for name in own}
    if given != own:
        raise ValueError(
            f"{subject} be from rank {own['rank']} of {own['num_ranks']}, got a state from rank {given['rank']} of "
            f"{given['num_ranks']}; every rank saves and loads its own state. If the number of ranks has changed, load "
            "only the weights, before attach"
        )
