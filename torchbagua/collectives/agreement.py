"""Agreement between ranks over an open group: small numbers, and the progress of each rank."""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

_MOST_PIECES = 1024
_WORD_BYTES = 7  # of text, in a number


def all_reduce_max(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
    """Return the maximum of each value over the ranks, the same on all ranks, in log2(n) exchanges.

    Args:
        communicator: the ranks that agree.
        values: the values of this rank; every rank passes the same number of values.
        purpose: the purpose of the agreement, in events and errors.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    largest = torch.tensor(values, dtype=torch.int64)
    distance = 1
    while distance < communicator.size:
        source = communicator.rank_before(distance)
        theirs = torch.empty_like(largest)
        turns = [(communicator.rank_after(distance), source)]
        pipeline = Pipeline(communicator, theirs.device)
        # If ranks are in different agreements, a message of another length has another tag, and this rank times out.
        # A transport may end the process if it receives a message that is too long. MPI guarantees 15 bits for tags.
        piece = len(values) % _MOST_PIECES
        Exchange(pipeline, "agreement", {source: theirs}, purpose, turns, piece=piece).run([largest])
        torch.maximum(largest, theirs, out=largest)
        distance *= 2
    return largest.tolist()


def fingerprint(value: object) -> int:
    """Return a number that identifies `value` by its repr, for `require_same_progress` to compare."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def fingerprint_of_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that identifies the values of these tensors, for `require_same_progress` to compare."""
    found = hashlib.sha256()
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        found.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))  # numpy may be missing
    return int.from_bytes(found.digest()[:5], "big")


class _RankedNumber(NamedTuple):
    """A number and the rank that has it. The maximum of several packed pairs is the pair with the largest number."""

    number: int
    rank: int

    def pack(self, size: int) -> int:
        """Return both as one number, which sorts in the order of the pairs."""
        return self.number * size + self.rank

    @classmethod
    def unpack(cls, packed: int, size: int) -> "_RankedNumber":
        """Return the pair that `pack` has packed."""
        return cls(*divmod(packed, size))


class Difference(NamedTuple):
    """Two ranks with different numbers, the lower rank first.

    Attributes:
        name: the name of the number.
        ranks: the two ranks.
        numbers: the number of each rank.
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
        communicator: the ranks that compare their numbers.
        numbers: numbers below 2^40, by name; every rank passes the same number of them.
        purpose: the operation that follows, in errors.
        value: any number.

    Raises:
        CommunicationError: a peer disconnected.
    """
    size, rank = communicator.size, communicator.rank
    highest = [_RankedNumber(number, rank).pack(size) for number in numbers.values()]
    # The maximum of the negated numbers is the minimum of the numbers.
    lowest = [_RankedNumber(-number, rank).pack(size) for number in numbers.values()]
    largest_value, *found = all_reduce_max(communicator, [value, *highest, *lowest], purpose)
    holders = [_RankedNumber.unpack(packed, size) for packed in found]
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
    """Return the largest `value` of all ranks; raise the same error on all ranks if their progress differs.

    A transport may end the process if the two sides of a message differ in length. Ranks whose progress may differ
    therefore compare it before they send such a message.

    Args:
        communicator: the ranks that compare their progress.
        progress: numbers below 2^40, by their names in the error; every rank passes the same number of them.
        purpose: the operation that follows, in errors.
        value: any number.
        check_value: called with the largest value before the ranks compare their progress. It may raise.

    Raises:
        CommunicationError: the progress of two ranks differs; names both ranks, the quantity and both numbers. Or a
            peer disconnected.
    """
    largest_value, difference = find_difference(communicator, progress, purpose, value)
    check_value(largest_value)
    if difference is not None:
        name, (first, second), (first_number, second_number) = difference
        calls = _name_calls(communicator, difference.ranks, purpose)
        raise CommunicationError(
            f"torchbagua: ranks are out of step in {purpose}: rank {first} has {first_number} {name}, rank "
            f"{second} has {second_number}.{calls} Every rank must run the same backward passes, optimizer steps, "
            "averaged_weights, state loads, layer unfreezes, aborts and resumes, in the same order. Check whether a "
            "rank ran out of data, left early or skipped a step of an optimizer; if a GradScaler can skip a step on "
            "one rank, pass it to attach(..., grad_scaler=scaler)."
        )
    return largest_value


def _name_calls(communicator: Communicator, ranks: tuple[int, int], purpose: str) -> str:
    """Return a sentence that names the purposes of two ranks, if they differ. Collective, after a difference."""
    own_rank = communicator.ranks[communicator.rank]
    own = purpose.encode()[: 8 * _WORD_BYTES].ljust(8 * _WORD_BYTES)
    words = [int.from_bytes(own[start : start + _WORD_BYTES], "big") for start in range(0, len(own), _WORD_BYTES)]
    values = [word if own_rank == rank else 0 for rank in ranks for word in words]
    try:
        largest = all_reduce_max(communicator, values, purpose)
    except CommunicationError:  # the difference is the better error
        return ""
    text = b"".join(word.to_bytes(_WORD_BYTES, "big") for word in largest)
    first, second = (part.decode(errors="ignore").strip() for part in (text[: len(own)], text[len(own) :]))
    return "" if first == second else f" Rank {ranks[0]} is in {first}, rank {ranks[1]} in {second}."
