"""Records the loads of weights on a rank since attach, and checks that all ranks have loaded the same weights."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchbagua.collectives.agreement import find_difference, fingerprint, fingerprint_of_values
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

_COUNT = "loads"


class LoadMark(NamedTuple):
    """A summary of the loads on a rank.

    Attributes:
        num_loads: the number of loads.
        digest: a fingerprint of the loaded names and values, below 2^40.
        is_pending: whether the last load has not taken effect yet, and is not in the digest.
    """

    num_loads: int = 0
    digest: int = 0
    is_pending: bool = False

    def with_pending(self) -> "LoadMark":
        """Return the mark with one more load, which has not taken effect yet."""
        return LoadMark(self.num_loads + 1, self.digest, is_pending=True)


class LoadRecord:
    """Records the loads of weights into the module of one rank.

    Attributes:
        mark: the summary of the loads that have taken effect.
        is_pending: whether weights were loaded that have not taken effect yet, since no step has begun.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self.forget()

    def note_pending(self, is_pending: bool) -> None:
        """Set `is_pending`."""
        self.is_pending = is_pending

    def forget(self) -> None:
        """Reset the record, on all ranks: a loaded state defines the weights of each rank."""
        self.mark = self._compared = LoadMark()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Record a load of these values, keyed by weight name."""
        names = sorted(values)
        digest = fingerprint((self.mark.digest, names, fingerprint_of_values(values[name] for name in names)))
        self.mark = LoadMark(self.mark.num_loads + 1, digest)

    def take(self) -> tuple[LoadMark, bool]:
        """Return the mark, and whether ranks must still compare it. Later calls treat this mark as compared.

        A pending load is included, since other ranks may have begun a step. But it is not new: it may be undone.
        """
        is_new = self.mark != self._compared
        self._compared = self.mark
        return self.mark.with_pending() if self.is_pending else self.mark, is_new


def require_same_loads(communicator: Communicator, mark: LoadMark, purpose: str) -> None:
    """Raise the same error on all ranks unless all ranks have recorded the same loads. Collective.

    While a load is pending on any rank, they compare only the numbers of loads. They compare the values later.

    Raises:
        CommunicationError: two ranks differ, and the message names both. Or a peer has disconnected.
    """
    numbers = {_COUNT: mark.num_loads, "a digest of what was loaded": mark.digest}
    any_pending, difference = find_difference(communicator, numbers, purpose, int(mark.is_pending))
    if difference is None:
        return
    if difference.name == _COUNT:
        raise different_loads(difference.ranks, difference.numbers)
    if any_pending:
        return
    first, second = difference.ranks
    raise CommunicationError(f"{_PROBLEM}: ranks {first} and {second} have loaded different values. {_FIX}")


def different_loads(ranks: tuple[int, int], num_loads: tuple[int, int]) -> CommunicationError:
    """Return the error for two ranks with these different numbers of loads."""
    seen = [f"{number} load{'' if number == 1 else 's'}" for number in num_loads]
    return CommunicationError(f"{_PROBLEM}: rank {ranks[0]} has seen {seen[0]}, rank {ranks[1]} {seen[1]}. {_FIX}")


_PROBLEM = "torchbagua: ranks have not loaded the same weights since attach"
_FIX = (
    "Load the same values on all ranks; if one rank loads and broadcasts them, call attachment.weights_changed() on "
    "all ranks afterwards. To resume each rank's own weights, load the attachment's state after them. To change one "
    "rank's weights alone, write them in place: parameter.copy_(value) under torch.no_grad()"
)
