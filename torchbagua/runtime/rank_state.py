"""State that belongs to one rank, and is refused by any other."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchbagua.collectives.process_group import BaguaProcessGroup


def owner_of(group: BaguaProcessGroup) -> dict[str, int]:
    """Return whose state it is: a part of what `state_dict` returns."""
    return {"rank": group.rank, "num_ranks": group.size}


def check_keys(owner: str, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError, which names `owner`, where `state` lacks one of these keys."""
    if not isinstance(state, Mapping) or not state.keys() >= set(keys):
        got = sorted(state) if isinstance(state, Mapping) else repr(state)
        raise ValueError(f"{owner}.load_state_dict: state must have the keys {sorted(keys)}, got {got}")


def check_rank_state(owner: str, state: Mapping[str, Any], keys: Sequence[str], group: BaguaProcessGroup) -> None:
    """Raise ValueError, which names `owner`, where `state` lacks one of these keys or is another rank's."""
    own = owner_of(group)
    check_keys(owner, state, [*own, *keys])
    subject = f"{owner}.load_state_dict: state must"
    given = {name: state[name] for name in own}
    if given != own:
        raise ValueError(
            f"{subject} be that of rank {own['rank']} of {own['num_ranks']}, got that of rank {given['rank']} of "
            f"{given['num_ranks']}; every rank saves and loads its own. Where the number of ranks has changed, load "
            "the weights before attach, and no state"
        )
