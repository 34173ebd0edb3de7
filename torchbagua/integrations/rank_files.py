"""Saves and loads each rank's `Attachment.rank_state_dict` in checkpoints: gathered in one, or one file per rank."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import Attachment
from torchbagua._warnings import warn_user


def gather_rank_states(attachment: Attachment) -> list[dict[str, Any]]:
    """Return every rank's `Attachment.rank_state_dict` on rank 0 of the world, and an empty list on other ranks.

    Collective over the default group, like the frameworks' own saves. The algorithm's group is not used, since each
    rank may be communicating over it.
    """
    buffer = io.BytesIO()
    torch.save(attachment.rank_state_dict(), buffer)
    files = [b""] * dist.get_world_size()
    dist.gather_object(buffer.getvalue(), files if dist.get_rank() == 0 else None)  # noqa: TID251
    return [torch.load(io.BytesIO(file), "cpu", weights_only=True) for file in files if file]


def load_gathered_rank_state(attachment: Attachment, states: Sequence[dict[str, Any]] | None) -> None:
    """Load this rank's state from the result of `gather_rank_states`; rank 0's on a rank that did not save.

    Gives a RuntimeWarning if `states` is None: no algorithm was attached when the checkpoint was written.

    Raises:
        ValueError: see `Attachment.load_rank_state_dict`.
    """
    if states is None:
        warn_user("torchbagua: the checkpoint has no state of the ranks: all ranks continue from the weights in it")
        return
    rank = dist.get_rank()
    attachment.load_rank_state_dict(states[rank if rank < len(states) else 0])


def save_rank_state(attachment: Attachment, files: Path, rank: int) -> None:
    """Write this rank's state to the file `<files>_<rank>.pt`."""
    files.parent.mkdir(parents=True, exist_ok=True)
    torch.save(attachment.rank_state_dict(), f"{files}_{rank}.pt")


def load_rank_state(attachment: Attachment, files: Path, num_ranks: int) -> None:
    """Load as `load_noted_rank_state`, or from rank 0's file on a rank without a file if all ranks have one state.

    Raises:
        FileNotFoundError, ValueError: see `load_noted_rank_state`.
    """
    runner = attachment.runner
    if runner.averages_weights or runner.parameter_state is not None:
        load_noted_rank_state(attachment, files, num_ranks)
        return
    own = Path(f"{files}_{dist.get_rank()}.pt")
    file = own if own.exists() else Path(f"{files}_0.pt")
    attachment.load_rank_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def load_noted_rank_state(attachment: Attachment, files: Path, num_ranks: int) -> None:
    """Load the files that `save_rank_state` wrote on `num_ranks` ranks, the number recorded in the checkpoint.

    Either all ranks load or none. Collective over the default group. If `num_ranks` is 0, existing files are from
    another run and are ignored, with a RuntimeWarning. Ranks from `num_ranks` on load rank 0's file.

    Raises:
        FileNotFoundError: a rank's file is missing; raised on all ranks.
        ValueError: ranks disagree on `num_ranks`. Also raised by `Attachment.load_rank_state_dict`.
    """
    rank = dist.get_rank()
    file = Path(f"{files}_{rank if rank < num_ranks else 0}.pt")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (num_ranks, "" if file.exists() else str(file)))  # noqa: TID251
    if len({noted for noted, _ in found}) > 1:
        raise ValueError(
            f"torchbagua: {files.parent} is not the same checkpoint on all ranks: the number of ranks that saved an "
            f"algorithm's state differs, got {[noted for noted, _ in found]}"
        )
    if num_ranks == 0:
        warn_user(f"torchbagua: {files.parent} has no state of an algorithm; it starts again from these weights")
        return
    lacking = [other for other, (_, missing) in enumerate(found) if missing]
    if lacking:
        raise FileNotFoundError(
            f"torchbagua: {found[lacking[0]][1]}, which rank {lacking[0]} must load, does not exist: ranks {lacking} "
            f"did not save, or their files are elsewhere. All {num_ranks} ranks must save, not the main process alone, "
            "and each rank needs its own file where it loads the checkpoint"
        )
    attachment.load_rank_state_dict(torch.load(file, map_location="cpu", weights_only=True))
