"""Runs the communication of a sharded module on several threads, and closes all groups when one thread fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from torchbagua import _concurrency
from torchbagua._torch import queue_callback
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.fsdp.parts import CommunicatingPart
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.lane import Job
from torchbagua.runtime.runner import Runner


class FirstFailure:
    """Closes all groups of a module when communication over one group fails, so that other ranks notice at once.

    Later failures follow from the closed groups. They raise the first error instead, which names the peer.
    """

    def __init__(self, groups: Sequence[BaguaProcessGroup]) -> None:
        self._groups = groups
        self._lock = _concurrency.Lock()
        self._error: Exception | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If the block raises, close the groups and raise the first error of all blocks."""
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
    """Runs the algorithm's communication for a sharded module, in forward and backward."""

    def __init__(self, runner: Runner, replicas: BaguaProcessGroup | None = None) -> None:
        self.algorithm_runner = runner
        self.group = runner.process_group
        self.replicas = replicas
        self.failure = FirstFailure([self.group] if replicas is None else [self.group, replicas])
        self._in_flight: Job[None] | None = None

    def compare_rows(
        self, group: BaguaProcessGroup, parts: Sequence[CommunicatingPart], replicas: SameRows | None = None
    ) -> SameRows:
        """Return the comparison of rows over `group`, which notifies the one over `replicas`. Collective on GPUs."""
        if not any(group.world.in_stream_order(part.param_group.device) for part in parts):
            return SameRows(group.world, parts, replicas=replicas)
        lane = self.algorithm_runner.lane
        return SameRows(group.world.silent_twin(), parts, replicas=replicas, lane=lane, guard=self.failure.guard)

    def run(
        self,
        group: BaguaProcessGroup,
        name: str,
        x: torch.Tensor,
        communicate: Callable[[], None],
        *,
        until_end: bool = False,
    ) -> None:
        """Call `communicate`: in stream order on this thread and its current stream; else on the lane, and wait for it.

        With `until_end`, a backward waits for it at its end. If it fails, all groups are closed, so that other ranks
        are notified at once.
        """
        tracer = self.group.tracer

        def communicate_traced() -> None:
            with self.failure.guard(), tracer.bucket_span(name, x), tracer.range(name):
                communicate()

        if group.world.in_stream_order(x.device):
            with torch.inference_mode(False):  # scratch memory created now is also written outside of inference mode
                communicate_traced()
            return
        self._wait()
        self._in_flight = self.algorithm_runner.lane.submit(communicate_traced)
        if until_end:
            with suppress(RuntimeError):  # no backward is running
                queue_callback(self._wait)
                return
        self._wait()

    def _wait(self) -> None:
        job, self._in_flight = self._in_flight, None
        if job is not None:
            job.result()
