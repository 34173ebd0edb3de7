"""How long backward waits for its last bucket, as observers are told."""

from collections.abc import Generator

import torch

from torchbagua._torch import queue_callback
from torchbagua.observe.clocks import Timestamp
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.bucket import BaguaBucket


class WaitTimer:
    """Runs the last bucket of a backward and tells observers of the wait for it; ends the step where no optimizer does.

    In this order:

    1. DDP's hook makes it, and submits it, which notes on the lane when the bucket is done.
    2. The hook returns, and DDP queues a callback with the autograd engine, behind the one that was queued here.
    3. All gradients are computed: the callback from here notes that the wait begins, and queues another one.
    4. DDP's callback waits for all buckets, and copies the averages into the gradients.
    5. The second one from here tells of the wait. Not before: DDP copies with communication or without.

    Args:
        last: the bucket.
        tracer: tells observers.
        is_in_backward: False on a rank that has run out of data, where nothing waits in a backward, and neither that
            nor an optimizer tells that a step ends: `run` does.
    """

    def __init__(self, last: BaguaBucket, tracer: Tracer, *, is_in_backward: bool) -> None:
        self._last = last
        self._tracer = tracer
        self._is_in_backward = is_in_backward
        self._begun: Timestamp = 0
        self._done: Timestamp = 0
        if is_in_backward:
            queue_callback(self._begin)

    def run(self) -> torch.Tensor:
        """Run the bucket."""
        flat = self._last.run()
        self._note_end()
        return flat

    def may_begin(self) -> bool:
        """Return whether the bucket may begin while the one before is under way."""
        return self._last.may_begin()

    def steps(self) -> Generator[None, None, torch.Tensor]:
        """Run the bucket in its steps."""
        flat = yield from self._last.steps()
        self._note_end()
        return flat

    def _note_end(self) -> None:
        self._done = self._tracer.now()
        if not self._is_in_backward:
            self._tracer.end_step()

    def _begin(self) -> None:
        self._begun = self._tracer.now()
        queue_callback(self._end)

    def _end(self) -> None:
        self._tracer.tell("wait", self._begun, self._done)
        if not self._tracer.has_optimizer:
            self._tracer.end_step()
