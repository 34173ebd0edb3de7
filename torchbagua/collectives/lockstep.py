"""Small numbers that ranks agree on while they train, over a group and not its store."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.errors import CommunicationError
from torchbagua.collectives.exchange import Exchange


def maximum(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
    """Return the largest of every value over the ranks, the same on all of them, in log2(n) exchanges.

    Args:
        communicator: whose ranks agree.
        values: as many on every rank.
        purpose: what for, in events and errors.

    Raises:
        CommunicationError: a peer is gone or did not take part within the group's timeout.
    """
    largest = torch.tensor(values, dtype=torch.int64)
    distance = 1
    while distance < communicator.size:
        source = communicator.rank_before(distance)
        theirs = torch.empty_like(largest)
        exchange = Exchange(
            communicator, "agreement", {source: theirs}, purpose, [(communicator.rank_after(distance), source)]
        )
        exchange.run(lambda target: largest)
        torch.maximum(largest, theirs, out=largest)
        distance *= 2
    return largest.tolist()


def fingerprint(value: object) -> int:
    """Return a number that stands for `value`, told by its repr, among the facts of `check_in_step`."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def check_in_step(communicator: Communicator, facts: Mapping[str, int], purpose: str, value: int = 0) -> int:
    """Return the largest `value` of all ranks, or raise the same error on all unless `facts` are equal on all of them.

    Messages of other lengths would end the process in gloo, so ranks that may have come to different places compare the
    same facts.

    Args:
        communicator: whose ranks compare.
        facts: numbers below 2^40 by what the error calls them, as many on every rank.
        purpose: what is about to be done.
        value: any number.

    Raises:
        CommunicationError: two ranks differ; names both, the fact and both numbers. Or a peer is gone.
    """
    size, rank = communicator.size, communicator.rank
    # A rank rides along, so that the largest value also says whose it is; the largest of -v is the smallest v.
    signed = [value * size + rank for fact in facts.values() for value in (fact, -fact)]
    largest, *combined = maximum(communicator, [value, *signed], purpose)
    extremes = [divmod(one, size) for one in combined]
    for name, (highest, holder), (lowest_negated, lowest_holder) in zip(
        facts, extremes[::2], extremes[1::2], strict=True
    ):
        if highest != -lowest_negated:
            _fail_out_of_step(communicator, purpose, name, (lowest_holder, -lowest_negated), (holder, highest))
    return largest


def _fail_out_of_step(
    communicator: Communicator, purpose: str, name: str, low: tuple[int, int], high: tuple[int, int]
) -> NoReturn:
    (low_rank, low_value), (high_rank, high_value) = sorted(
        (communicator.ranks[rank], value) for rank, value in (low, high)
    )
    raise CommunicationError(
        f"torchbagua: ranks are out of step in {purpose}: rank {low_rank} has {low_value} {name}, rank {high_rank} has "
        f"{high_value}. All ranks must do the same, in the same order: backward passes, optimizer steps, states "
        "loaded, layers set free, abort and resume. A rank that has run out of data, or left early, does not; nor does "
        "one that a GradScaler has made skip a step, unless it is given to attach(..., grad_scaler=scaler)."
    )
