"""The lifetime of the communicators of a `BaguaProcessGroup` after their construction: devices, polls and shutdown."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.base import TransportError
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, cause_of
from torchbagua.transport.streams import wait_on_host

# A wait for the GPU ends this much later than the lane's `poll` of its operations, whose error names the operation.
_POLL_MARGIN_S = 1.0


class PrivateCommunicators(NodeGroups):
    """Communicators that are prepared for devices, polled and closed together.

    Attributes:
        timeout: the longest wait for another rank.
        tracer: the tracer that notifies observers of communication over these communicators.
    """

    timeout: timedelta
    tracer: Tracer
    _gradients: Communicator | None = None  # separate from the others, see `BaguaProcessGroup.open_gradient_group`

    def use_device(self, device: torch.device) -> None:
        """Connect the private groups for tensors on `device`, if they are not connected yet. Collective.

        Raises:
            CommunicationError: a rank did not connect within the group's timeout, or the backend refuses.
        """
        self.device = device
        for communicator in self._communicators:
            try:
                communicator.use_device(device)
            except CommunicationError:
                self.close()
                raise

    def check_operations(self, device: torch.device, algorithm: str) -> None:
        """Raise the same error on all ranks if a backend lacks an operation for tensors on `device`. Collective.

        Args:
            device: the CPU, or a device that was passed to `use_device` before.
            algorithm: the algorithm that needs the operation, in the error.

        Raises:
            ValueError: a rank could not start an operation, or it failed; names backend, operation and algorithm.
            CommunicationError: a rank disconnected or did not take part within the group's timeout.
        """
        missing = self.world.missing_operation(device)
        if missing is not None:
            raise ValueError(
                f"torchbagua: backend {missing.backend} has no {missing.operation}, which {algorithm} needs for "
                f"tensors on {device.type}: {missing.cause}"
            )

    def report_to(self, tracer: Tracer, owner: str) -> None:
        """Notify another group's observers of communication over this group, and name its `owner` in errors."""
        self.tracer = tracer
        for communicator in self._communicators:
            communicator.tracer = tracer
            communicator.scope = f"{communicator.scope} of {owner}"

    def poll(self) -> bool:
        """Return whether a GPU is still working on operations that were launched since `move_to_lane`.

        Raises:
            CommunicationError: an operation runs longer than the timeout, or the GPU has failed.
        """
        are_in_flight = [communicator.poll() for communicator in self._communicators]  # every poll drops finished work
        return any(are_in_flight)

    def wait_for_gpu(self, device: torch.device, purpose: str) -> None:
        """Block the host until the current stream of a GPU has finished. Does nothing on the CPU.

        Raises:
            CommunicationError: the stream has not finished within the timeout; names the operation on which the GPU is
                working, or else `purpose`.
        """
        if device.type != "cuda":
            return
        try:
            wait_on_host(torch.cuda.current_stream(device).record_event(), self.timeout.total_seconds())
        except TimeoutError as error:
            self.poll()
            raise self.world.failure(purpose, cause_of(error)) from error
        self.poll()  # drops finished operations

    def wait_for_mark(self, mark: torch.cuda.Event, check: Callable[[], object] = lambda: None) -> bool:
        """Block the host until a GPU has reached `mark`. Call `check` repeatedly, which may raise. For any thread.

        Return False if the private groups are closed: an abort lets the GPU reach `mark` early, with partial results.

        Raises:
            CommunicationError: the GPU has not reached `mark` within the timeout.
        """
        try:
            wait_on_host(mark, self.timeout.total_seconds() + _POLL_MARGIN_S, check)
        except TimeoutError as error:
            raise self.world.failure("waiting for the GPU", cause_of(error)) from error
        return not any(communicator.is_closed for communicator in self._communicators)

    def end_in_order(self) -> None:
        """Finish all in-flight operations in stream order, and close their transports. Collective.

        If a rank does not call it, `close` aborts the operations, since a GPU would wait for a rank that died.
        """
        private = [
            transport
            for communicator in self._communicators
            for transport in communicator.collectively_closed_transports
        ]
        if not private:
            return
        name = private[0].name
        with suppress(CommunicationError):
            all_reduce_max(self.world, [0], f"closing the {name} groups")  # a barrier, which raises if a rank died
            try:
                for transport in private:
                    transport.close()
            except TransportError as error:
                warn_user(f"torchbagua: {error}; aborting the {name} groups")

    def close(self) -> None:
        """Close the private groups, even with operations in flight. This aborts the operations of GPUs."""
        for communicator in self._communicators:
            communicator.close()
        for communicator in self._communicators:  # after all are aborted, since one may wait for another
            communicator.join()

    def abandon(self) -> None:
        """Close the private groups while another thread waits for a rank over them; the wait ends with an error."""
        for communicator in self._communicators:
            communicator.interrupt()
        self.close()

    @property
    def _communicators(self) -> list[Communicator]:
        all_or_none = (self.world, self.intra_node, self.inter_node, self._gradients)
        return [communicator for communicator in all_or_none if communicator is not None]
