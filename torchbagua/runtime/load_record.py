"""Which loads of weights a rank has seen since attach, and that all ranks have seen the same."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchbagua.collectives.agreement import find_difference, fingerprint, fingerprint_of_values
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

_COUNT = "loads"


class LoadMark(NamedTuple):
    """The loads that a rank has seen.

    Attributes:
        num_loads: how many.
        digest: a number below 2^40 that tells their names and values from others.
    """

    num_loads: int = 0
    digest: int = 0


class LoadRecord:
    """What one rank notes of the weights that are loaded into its module.

    Attributes:
        mark: the loads so far.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, on all ranks: a loaded state says what each rank holds."""
        self.mark = self._compared = LoadMark()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Note a load of these values, by the names of the weights."""
        names = sorted(values)
        digest = fingerprint((self.mark.digest, names, fingerprint_of_values(values[name] for name in names)))
        self.mark = LoadMark(self.mark.num_loads + 1, digest)

    def take(self) -> tuple[LoadMark, bool]:
        """Return the mark, and whether ranks are still to compare it; from now on they have."""
        is_new = self.mark != self._compared
        self._compared = self.mark
        return self.mark, is_new


def require_same_loads(communicator: Communicator, mark: LoadMark, purpose: str) -> None:
    """Raise the same error on all ranks unless they have seen the same loads. Collective.

    Raises:
        CommunicationError: two ranks differ; names both. Or a peer is gone.
    """
    numbers = {_COUNT: mark.num_loads, "a digest of what was loaded": mark.digest}
    _, difference = find_difference(communicator, numbers, purpose)
    if difference is None:
        return
    if difference.name == _COUNT:
        raise different_loads(difference.ranks, difference.numbers)
    first, second = difference.ranks
    raise CommunicationError(f"{_WHAT}: ranks {first} and {second} have loaded different values. {_FIX}")


def different_loads(ranks: tuple[int, int], num_loads: tuple[int, int]) -> CommunicationError:
    """Return the error of two ranks that have seen so many loads."""
    seen = [f"{number} load{'' if number == 1 else 's'}" for number in num_loads]
    return CommunicationError(f"{_WHAT}: rank {ranks[0]} has seen {seen[0]}, rank {ranks[1]} {seen[1]}. {_FIX}")


_WHAT = "torchbagua: ranks have not loaded the same weights since attach"
_FIX = (
    "Load the same values on all ranks; if one rank loads and broadcasts them, call attachment.weights_changed() on "
    "all ranks afterwards. To resume each rank's own weights, load the attachment's state after them. To change one "
    "rank's weights alone, write them in place: parameter.copy_(value) under torch.no_grad()"
)
