"""What `Attachment.rank_state_dict` returns on each rank, in checkpoints: all in one, or a file for each rank."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import Attachment
from torchbagua._warnings import warn_user


def gather_rank_states(attachment: Attachment) -> list[dict[str, Any]]:
    """Return what `Attachment.rank_state_dict` returns on each rank, on rank 0 of the world; nothing on the others.

    Collective over the default group, as what frameworks do when they save: not over the group of the algorithm, in
    which each rank may be busy with something else.
    """
    buffer = io.BytesIO()
    torch.save(attachment.rank_state_dict(), buffer)
    files = [b""] * dist.get_world_size()
    dist.gather_object(buffer.getvalue(), files if dist.get_rank() == 0 else None)  # noqa: TID251
    return [torch.load(io.BytesIO(file), "cpu", weights_only=True) for file in files if file]


def load_gathered_rank_state(attachment: Attachment, states: Sequence[dict[str, Any]] | None) -> None:
    """Load this rank's of what `gather_rank_states` returned; of another number of ranks, rank 0's.

    A RuntimeWarning is given where `states` is None: the checkpoint was not written with an algorithm attached.

    Raises:
        ValueError: as `Attachment.load_rank_state_dict`.
    """
    if states is None:
        warn_user("torchbagua: the checkpoint has no state of the ranks: they all go on from the weights in it")
        return
    attachment.load_rank_state_dict(states[dist.get_rank() if len(states) == dist.get_world_size() else 0])


def save_rank_state(attachment: Attachment, files: Path, rank: int) -> None:
    """Write what this rank needs to go on into one of `files`, which are `<files>_<rank>.pt`."""
    files.parent.mkdir(parents=True, exist_ok=True)
    torch.save(attachment.rank_state_dict(), f"{files}_{rank}.pt")


def load_rank_state(attachment: Attachment, files: Path, rank: int) -> None:
    """Read what `save_rank_state` wrote. A rank that was not there then reads rank 0's, where the algorithm allows it.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: as `Attachment.load_rank_state_dict`.
    """
    own = Path(f"{files}_{rank}.pt")
    file = own if own.exists() else Path(f"{files}_0.pt")
    attachment.load_rank_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def load_noted_rank_state(attachment: Attachment, files: Path, num_ranks: int) -> None:
    """Read what `save_rank_state` wrote on `num_ranks` ranks, as the checkpoint says: on all ranks, or on none.

    Collective over the default group. With 0, files that are there are of another run and are left alone, with a
    RuntimeWarning. Ranks beyond `num_ranks` read rank 0's.

    Raises:
        FileNotFoundError, on all ranks: a rank lacks its file.
        ValueError: ranks disagree in `num_ranks`; or as `Attachment.load_rank_state_dict`.
    """
    rank = dist.get_rank()
    file = Path(f"{files}_{rank if rank < num_ranks else 0}.pt")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (num_ranks, "" if file.exists() else str(file)))  # noqa: TID251
    if len({noted for noted, _ in found}) > 1:
        raise ValueError(
            f"torchbagua: {files.parent} is not the same checkpoint on all ranks: it says that an algorithm's state "
            f"was saved by so many ranks: {[noted for noted, _ in found]}"
        )
    if num_ranks == 0:
        warn_user(f"torchbagua: {files.parent} has no state of an algorithm; it starts anew from these weights")
        return
    for other, (_, missing) in enumerate(found):
        if missing:
            raise FileNotFoundError(
                f"torchbagua: {missing}, which rank {other} has to read, does not exist; the checkpoint was saved by "
                f"{num_ranks} ranks, and each needs its own file where it reads the checkpoint"
            )
    attachment.load_rank_state_dict(torch.load(file, map_location="cpu", weights_only=True))
