"""Means that begin while the links still carry the one before.

Between two means that run one after the other no link has anything to carry: while the last bytes of one are decoded
and the first of the next are encoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from torchbagua.collectives.exchange import Pipeline
from torchbagua.transport.communicator import Communicator

# The most pieces in which a mean sends its chunks: as many numbers of pieces lie between two parts.
_MOST_PIECES = 2

# One mean is under way, and one more has begun.
_NUM_PARTS = 2


def exhaust(steps: Iterator[None]) -> None:
    """Run what yields now and then to its end."""
    for _ in steps:
        pass


class OverlappingMean(ABC):
    """A mean that may begin while another one is under way, if that is such a mean too.

    Called as a function, it runs from its beginning to its end.
    """

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        exhaust(self.steps(x_N, out_N))

    @abstractmethod
    def may_begin(self) -> bool:
        """Return whether `steps` comes to its first yield without a wait, whatever other ranks do."""

    @abstractmethod
    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Form the mean, and yield when it has begun, and then wherever the next one may begin.

        It yields nothing if it runs alone. Ranks need not begin the next one at the same place, or at all.
        """


class Overlap:
    """What the means over one communicator share: a pipeline, and places in it that take turns.

    Args:
        communicator: of all ranks that run them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pipeline: Pipeline | None = None
        self._num_means = 0
        self._parts_under_way: set[int] = set()

    def next_part(self) -> int:
        """Return the part of one more mean, see `RankChunks`. Those of two that follow each other differ.

        All ranks make the same means in the same order, so messages of a mean have the same number on all.
        """
        self._num_means += 1
        return (self._num_means - 1) % _NUM_PARTS * _MOST_PIECES

    def is_under_way(self, part: int) -> bool:
        """Return whether a mean of this part is under way."""
        return part in self._parts_under_way

    def begin(self, part: int, device: torch.device) -> Pipeline:
        """Return the pipeline of all means that are under way, for one more, of tensors on `device`."""
        if self._pipeline is None or (not self._parts_under_way and self._pipeline.device != device):
            self._pipeline = Pipeline(self._communicator, device)
        self._parts_under_way.add(part)
        return self._pipeline

    def end(self, part: int) -> None:
        """Say that a mean of this part is complete."""
        self._parts_under_way.remove(part)
