"""Times the first runs of an operation that sends in pieces, to decide whether pieces pay off."""

import math

from torchbagua import _concurrency
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.transport.communicator import Communicator

_NUM_RUNS = 3

# 1.6 Gbit/s, over the whole time of an operation. In faster operations, a second message costs more CPU time than the
# overlap of computation with the first message saves.
_SLOW_BYTES_PER_S = 0.2e9


class FirstRuns:
    """Counts the runs of an operation, and times them: a context manager around each run.

    Args:
        communicator: a communicator over all ranks that run the operation.
        sent_bytes: the bytes that this rank sends in a run, over most of its links.
        name: the name of the operation's tensor, in errors.
    """

    def __init__(self, communicator: Communicator, sent_bytes: float, name: str) -> None:
        self._communicator = communicator
        self._sent_bytes = sent_bytes
        self._purpose = f"the pieces of {name}"
        self._num_runs = 0
        self._shortest_s = math.inf
        self._start_s = 0.0

    @property
    def are_over(self) -> bool:
        """Whether the run that follows the decision of `should_disable_pieces` is complete too."""
        return self._num_runs > _NUM_RUNS

    def should_disable_pieces(self) -> bool:
        """Return, once, whether the first runs were fast on all ranks. Collective when called after the first runs."""
        if self._num_runs != _NUM_RUNS:
            return False
        is_slow = self._sent_bytes < _SLOW_BYTES_PER_S * self._shortest_s
        return not all_reduce_max(self._communicator, [is_slow], self._purpose)[0]

    def __enter__(self) -> None:
        self._start_s = _concurrency.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._shortest_s = min(self._shortest_s, _concurrency.perf_counter() - self._start_s)
        self._num_runs += 1
