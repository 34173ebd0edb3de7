"""Measures how long backward waits for its last bucket, and notifies observers."""

from collections.abc import Generator

import torch

from torchbagua._torch import queue_callback
from torchbagua.observe.clocks import Timestamp
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.bucket import BaguaBucket


class WaitTimer:
    """Runs the last bucket of a backward and notifies observers of the wait. Ends the step if no optimizer does.

    Execution order:

    1. DDP's hook creates the timer, which queues a callback with the autograd engine, and submits it to the lane. The
       lane records when the bucket is done.
    2. The hook returns, and DDP queues its own callback with the autograd engine, behind the timer's.
    3. Once all gradients are computed, the timer's callback records the start of the wait and queues a second callback.
    4. DDP's callback waits for all buckets and copies the means into the gradients.
    5. The timer's second callback notifies observers of the wait. It does so only after DDP's copies, which DDP makes
       with or without communication.

    Args:
        last: the last bucket.
        tracer: notifies observers.
        is_in_backward: False on a rank that has run out of data. On such a rank no backward waits.
        ends_step: whether `run` ends the step, on a rank on which neither a backward nor an optimizer signals its end.
    """

    def __init__(self, last: BaguaBucket, tracer: Tracer, *, is_in_backward: bool, ends_step: bool) -> None:
        self._last = last
        self._tracer = tracer
        self._ends_step = ends_step
        self._begun: Timestamp = 0
        self._done: Timestamp = 0
        if is_in_backward:
            queue_callback(self._begin)

    def run(self) -> torch.Tensor:
        """Reduce the bucket."""
        flat = self._last.run()
        self._note_end()
        return flat

    def may_begin(self) -> bool:
        """Return whether the bucket may begin while the previous bucket is in flight."""
        return self._last.may_begin()

    def steps(self) -> Generator[None, None, torch.Tensor]:
        """Reduce the bucket step by step."""
        flat = yield from self._last.steps()
        self._note_end()
        return flat

    def _note_end(self) -> None:
        self._done = self._tracer.now()
        if self._ends_step:
            self._tracer.end_step()

    def _begin(self) -> None:
        self._begun = self._tracer.now()
        queue_callback(self._end)

    def _end(self) -> None:
        self._tracer.tell("wait", self._begun, self._done)
        if not self._tracer.has_optimizer:
            self._tracer.end_step()
