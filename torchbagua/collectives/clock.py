"""How far apart the clocks of ranks are, so that their traces can be laid over each other."""

import time

import torch

from torchbagua.collectives.communicator import Communicator

# The quickest of several questions is the one that met the least of other people's traffic.
_NUM_QUESTIONS = 16
_TAG = 4  # no exchange's


def clock_offset(communicator: Communicator) -> tuple[int, int]:
    """Return (own clock, what is to be added to it for rank 0's), in ns of `time.perf_counter_ns`. Collective.

    Every rank asks rank 0 for its time; half of the way there and back is taken for the way back (Cristian,
    "Probabilistic clock synchronization", 1989). So the error is at most half of the shortest such way.

    Raises:
        CommunicationError: a peer is gone or did not take part within the group's timeout.
    """
    if communicator.rank == 0:
        for asker in range(1, communicator.size):
            for _ in range(_NUM_QUESTIONS):
                _receive(communicator, asker)
                _send(communicator, asker)
        return time.perf_counter_ns(), 0
    shortest_ns, now_ns, offset_ns = None, 0, 0
    for _ in range(_NUM_QUESTIONS):
        asked_ns = _send(communicator, 0)
        theirs_ns = _receive(communicator, 0)
        now_ns = time.perf_counter_ns()
        if shortest_ns is None or now_ns - asked_ns < shortest_ns:
            shortest_ns = now_ns - asked_ns
            offset_ns = theirs_ns - (asked_ns + now_ns) // 2
    return now_ns, offset_ns


def _send(communicator: Communicator, peer: int) -> int:
    """Send own time to a peer, and return it."""
    now_ns = time.perf_counter_ns()
    communicator.post("sending to", peer, torch.tensor([now_ns]), tag=_TAG, purpose="comparing clocks")
    communicator.wait("sending to", peer, tag=_TAG, purpose="comparing clocks")
    return now_ns


def _receive(communicator: Communicator, peer: int) -> int:
    time_ns = torch.empty(1, dtype=torch.int64)
    communicator.post("receiving from", peer, time_ns, tag=_TAG, purpose="comparing clocks")
    communicator.wait("receiving from", peer, tag=_TAG, purpose="comparing clocks")
    return int(time_ns)
