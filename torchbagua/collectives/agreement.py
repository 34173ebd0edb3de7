"""What ranks agree on over a group that is open: small numbers, and how far they have come."""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError


def all_reduce_max(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
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
        turns = [(communicator.rank_after(distance), source)]
        Exchange(Pipeline(communicator, theirs.device), "agreement", {source: theirs}, purpose, turns).run([largest])
        torch.maximum(largest, theirs, out=largest)
        distance *= 2
    return largest.tolist()


def fingerprint(value: object) -> int:
    """Return a number that stands for `value`, told by its repr, in what `require_same_progress` compares."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def fingerprint_of_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that tells the values of these tensors from others, in what `require_same_progress` compares."""
    found = hashlib.sha256()
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        found.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))  # numpy may be missing
    return int.from_bytes(found.digest()[:5], "big")


class _Holder(NamedTuple):
    """A number, and the rank that has it; the largest of several is that of the largest number."""

    number: int
    rank: int

    def packed(self, size: int) -> int:
        """Return both as one number, of which the order is that of these."""
        return self.number * size + self.rank

    @classmethod
    def unpacked(cls, packed: int, size: int) -> "_Holder":
        """Return what `packed` holds."""
        return cls(*divmod(packed, size))


class Difference(NamedTuple):
    """Two ranks that hold different numbers, the lower rank first.

    Attributes:
        name: what the number is.
        ranks: the two.
        numbers: of each.
    """

    name: str
    ranks: tuple[int, int]
    numbers: tuple[int, int]


def find_difference(
    communicator: Communicator, numbers: Mapping[str, int], purpose: str, value: int = 0
) -> tuple[int, Difference | None]:
    """Return the largest `value` of all ranks, and the first of `numbers` in which two ranks differ. Collective.

    Both results are the same on all ranks.

    Args:
        communicator: whose ranks compare.
        numbers: below 2^40, by name, as many on every rank.
        purpose: what is about to be done, in errors.
        value: any number.

    Raises:
        CommunicationError: a peer is gone.
    """
    size, rank = communicator.size, communicator.rank
    highest = [_Holder(number, rank).packed(size) for number in numbers.values()]
    # The largest of the negated numbers is the smallest.
    lowest = [_Holder(-number, rank).packed(size) for number in numbers.values()]
    largest_value, *found = all_reduce_max(communicator, [value, *highest, *lowest], purpose)
    holders = [_Holder.unpacked(packed, size) for packed in found]
    for name, high, low in zip(numbers, holders[: len(numbers)], holders[len(numbers) :], strict=True):
        if high.number != -low.number:
            ends = {communicator.ranks[high.rank]: high.number, communicator.ranks[low.rank]: -low.number}
            (first, first_number), (second, second_number) = sorted(ends.items())
            return largest_value, Difference(name, (first, second), (first_number, second_number))
    return largest_value, None


def require_same_progress(
    communicator: Communicator,
    progress: Mapping[str, int],
    purpose: str,
    value: int = 0,
    check_value: Callable[[int], object] = lambda value: None,
) -> int:
    """Return the largest `value` of all ranks, or raise the same error on all unless they have come equally far.

    A transport may end the process if the two sides of a message differ in length, so ranks that may have come to
    different places compare this before.

    Args:
        communicator: whose ranks compare.
        progress: numbers below 2^40 by what the error calls them, as many on every rank.
        purpose: what is about to be done.
        value: any number.
        check_value: called with the largest value, before ranks compare their progress. It may raise.

    Raises:
        CommunicationError: two ranks differ; names both, what it is and both numbers. Or a peer is gone.
    """
    largest_value, difference = find_difference(communicator, progress, purpose, value)
    check_value(largest_value)
    if difference is not None:
        name, (first, second), (first_number, second_number) = difference
        raise CommunicationError(
            f"torchbagua: ranks are out of step in {purpose}: rank {first} has {first_number} {name}, rank "
            f"{second} has {second_number}. All ranks must do the same, in the same order: backward passes, "
            "optimizer steps, states loaded, layers set free, abort and resume. A rank that has run out of data, "
            "or left early, does not; nor does one that a GradScaler has made skip a step, unless it is given to "
            "attach(..., grad_scaler=scaler)."
        )
    return largest_value
