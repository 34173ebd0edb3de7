"""What runs the communication of a sharded module, on several threads, and what happens when one of them fails."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchbagua._torch import queue_callback
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.job import Job
from torchbagua.runtime.runner import Runner


class FirstFailure:
    """Closes all groups of a module when communication over one of them fails, so that other ranks notice at once.

    What fails after that fails because the groups are closed, and raises the first error, which names the peer.

    Args:
        groups: over which is communicated, on several threads.
    """

    def __init__(self, groups: Sequence[BaguaProcessGroup]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Close the groups if the block raises, and raise the first error of all blocks."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                if self._error is None and isinstance(error, Exception):
                    self._error = error
                first = self._error
            for group in self._groups:
                group.close()
            if first is None or first is error:
                raise
            raise first from None


class FsdpCommRunner:
    """Runs what the algorithm communicates for a sharded module, in forward and backward.

    Args:
        runner: whose lane, group and traces are used; its ranks are those among which the module is sharded.
        replicas: the ranks that hold the same shards, if there are several.

    Attributes:
        algorithm_runner: the runner of the algorithm.
        replicas: the same.
        group: that of the runner.
        failure: is notified of errors.
    """

    def __init__(self, runner: Runner, replicas: BaguaProcessGroup | None = None) -> None:
        self.algorithm_runner = runner
        self.group = runner.process_group
        self.replicas = replicas
        self.failure = FirstFailure([self.group] if replicas is None else [self.group, replicas])
        self._under_way: Job[None] | None = None

    def run(
        self,
        group: BaguaProcessGroup,
        name: str,
        x: torch.Tensor,
        communicate: Callable[[], None],
        *,
        until_end: bool = False,
    ) -> None:
        """Call `communicate`: in stream order on this thread and its current stream, else on the lane, and wait for it.

        If it fails, all groups are closed, so that other ranks are notified at once.

        Args:
            group: over which it communicates.
            name: of what it does, in events.
            x: the tensor that it is about.
            communicate: the collective, with its tensors.
            until_end: let it go on, on the lane, until backward ends, or the next is run. It holds the gradient of a
                whole layer, and more than one would cost the memory that sharding saves.
        """
        tracer = self.group.tracer

        def communicate_traced() -> None:
            with self.failure.guard(), tracer.bucket_span(name, x), tracer.range(name):
                communicate()

        if group.world.in_stream_order(x.device):
            with torch.inference_mode(False):  # scratch that is made now is written to outside of it too
                communicate_traced()
            return
        self._wait()
        self._under_way = self.algorithm_runner.lane.submit(communicate_traced)
        if not (until_end and self._will_wait()):
            self._wait()

    def _will_wait(self) -> bool:
        try:
            queue_callback(self._wait)
        except RuntimeError:  # no backward is under way
            return False
        return True

    def _wait(self) -> None:
        job, self._under_way = self._under_way, None
        if job is not None:
            job.result()
