"""Offsets between the clocks of ranks, for traces on a common time axis."""

from collections.abc import Collection

import torch

from torchbagua import _concurrency
from torchbagua.observe.events import ClockOffset
from torchbagua.transport.communicator import Communicator

# The fastest of several round trips met the least foreign traffic.
_NUM_QUESTIONS = 64
_TAG = 32_766  # above those of exchanges; MPI guarantees 15 bits
_PURPOSE = "comparing clocks"


def clock_offset(communicator: Communicator, askers: Collection[int]) -> ClockOffset:
    """Return the offset from this rank's `time.perf_counter_ns` to rank 0's; add it to get rank 0's time. Collective.

    Every rank in `askers` asks rank 0 for its time; the other ranks share rank 0's clock. The estimate assumes that the
    answer takes half of the round trip (Cristian, "Probabilistic clock synchronization", 1989). The error is therefore
    at most half of the shortest round trip.
    """
    if communicator.rank == 0:
        for asker in askers:
            communicator.connect([asker], _PURPOSE)
            for _ in range(_NUM_QUESTIONS):
                _receive(communicator, asker)
                _send(communicator, asker)
    if communicator.rank not in askers:
        return ClockOffset(_concurrency.perf_counter_ns(), 0, 0)
    communicator.connect([0], _PURPOSE)
    answers = []
    for _ in range(_NUM_QUESTIONS):
        asked_ns = _send(communicator, 0)
        theirs_ns = _receive(communicator, 0)
        now_ns = _concurrency.perf_counter_ns()
        answers.append(ClockOffset(now_ns, theirs_ns - (asked_ns + now_ns) // 2, (now_ns - asked_ns + 1) // 2))
    return min(answers, key=lambda answer: answer.error_ns)


def _send(communicator: Communicator, peer: int) -> int:
    """Send this rank's time to a peer, and return it."""
    now_ns = _concurrency.perf_counter_ns()
    communicator.post("sending to", peer, torch.tensor([now_ns]), tag=_TAG, purpose=_PURPOSE)
    communicator.wait("sending to", peer, tag=_TAG, purpose=_PURPOSE)
    return now_ns


def _receive(communicator: Communicator, peer: int) -> int:
    time_ns = torch.empty(1, dtype=torch.int64)
    communicator.post("receiving from", peer, time_ns, tag=_TAG, purpose=_PURPOSE)
    communicator.wait("receiving from", peer, tag=_TAG, purpose=_PURPOSE)
    return int(time_ns)
