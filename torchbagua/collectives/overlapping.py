"""Means that begin while the links still carry the previous mean.

Without overlap, the links are idle between two means, while ranks decode the last bytes of one mean and encode the
first bytes of the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from torchbagua.collectives.exchange import Pipeline
from torchbagua.transport.communicator import Communicator

# The largest number of pieces in which a mean sends its chunks. The piece numbers of consecutive parts differ by this.
_MAX_PIECES = 2

# One mean is in flight, and a second one has begun.
_NUM_PARTS = 2


def exhaust(steps: Iterator[None]) -> None:
    """Run a generator to its end."""
    for _ in steps:
        pass


class OverlappingMean(ABC):
    """A mean that may begin while another overlapping mean is in flight.

    A call runs it from beginning to end.
    """

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        exhaust(self.steps(x_N, out_N))

    @abstractmethod
    def may_begin(self) -> bool:
        """Return whether `steps` reaches its first yield without blocking, whatever other ranks do."""

    @abstractmethod
    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean; yield when it has begun, and then at each point at which the next mean may begin.

        It yields nothing if it runs alone. Ranks may begin the next mean at different yields, or not at all.
        """


class Overlap:
    """The state that the means over one communicator share: a pipeline, and parts, which alternate.

    Args:
        communicator: a communicator over all ranks that run these means.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pipeline: Pipeline | None = None
        self._num_means = 0
        self._parts_in_flight: set[int] = set()

    def next_part(self) -> int:
        """Return the part for another mean, see `RankChunks`. Consecutive means have different parts.

        All ranks construct the same means in the same order, so the messages of a mean have the same piece numbers on
        all ranks.
        """
        self._num_means += 1
        return (self._num_means - 1) % _NUM_PARTS * _MAX_PIECES

    def is_in_flight(self, part: int) -> bool:
        """Return whether a mean of this part is in flight."""
        return part in self._parts_in_flight

    def begin(self, part: int, device: torch.device) -> Pipeline:
        """Register one more mean, of tensors on `device`, and return the pipeline of all means that are in flight."""
        if self._pipeline is None or (not self._parts_in_flight and self._pipeline.device != device):
            self._pipeline = Pipeline(self._communicator, device)
        self._parts_in_flight.add(part)
        return self._pipeline

    def end(self, part: int) -> None:
        """Record that the mean of this part is complete."""
        self._parts_in_flight.remove(part)
