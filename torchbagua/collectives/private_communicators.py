"""The lifetime of the communicators of a `BaguaProcessGroup`, after they are made: devices, polls and the end."""

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


class PrivateCommunicators(NodeGroups):
    """Communicators that are prepared for devices, polled and closed together.

    Attributes:
        timeout: the longest wait for another rank.
        tracer: notifies the observers of what is done over them.
    """

    timeout: timedelta
    tracer: Tracer
    _gradients: Communicator | None = None  # beside the others, see `BaguaProcessGroup.open_gradient_group`

    def use_device(self, device: torch.device) -> None:
        """Connect the private groups for tensors on `device`, if they are not connected yet. Collective.

        Raises:
            CommunicationError: a rank did not come within the group's timeout, or the backend refuses.
        """
        self.device = device
        for communicator in self._communicators:
            try:
                communicator.use_device(device)
            except CommunicationError:
                self.close()
                raise

    def check_operations(self, device: torch.device, algorithm: str) -> None:
        """Raise an error, the same on all ranks, if a backend lacks what moves tensors on `device`. Collective.

        Args:
            device: given to `use_device` before, unless it is the CPU.
            algorithm: what needs the operation, in the error.

        Raises:
            ValueError: a rank could not start an operation, or it failed; names backend, operation and algorithm.
            CommunicationError: a rank is gone or did not take part within the group's timeout.
        """
        missing = self.world.missing_operation(device)
        if missing is not None:
            raise ValueError(
                f"torchbagua: backend {missing.backend} has no {missing.operation}, which {algorithm} needs for "
                f"tensors on {device.type}: {missing.cause}"
            )

    def tell_through(self, tracer: Tracer, whose: str) -> None:
        """Notify the observers of another group of what is done over this one, and name `whose` it is in errors."""
        self.tracer = tracer
        for communicator in self._communicators:
            communicator.tracer = tracer
            communicator.scope = f"{communicator.scope} of {whose}"

    def poll(self) -> bool:
        """Return whether a GPU is still working on what was launched since `move_beside_training`.

        Raises:
            CommunicationError: it has worked on something for longer than the timeout, or the GPU has failed.
        """
        are_under_way = [communicator.poll() for communicator in self._communicators]  # each forgets what is done
        return any(are_under_way)

    def wait_for_gpu(self, device: torch.device, purpose: str) -> None:
        """Have the host wait until the current stream of a GPU is done. Does nothing on the CPU.

        Raises:
            CommunicationError: it is not done within the timeout; names what the GPU is working on, or else `purpose`.
        """
        if device.type != "cuda":
            return
        try:
            wait_on_host(torch.cuda.current_stream(device).record_event(), self.timeout.total_seconds())
        except TimeoutError as error:
            self.poll()
            raise self.world.failure(purpose, cause_of(error)) from error
        self.poll()  # which forgets what is done

    def end_in_order(self) -> None:
        """Finish all operations under way in stream order, and close their transports. Collective.

        If not all ranks call it, `close` breaks them off: a GPU would wait for a rank that is gone.
        """
        private = [transport for communicator in self._communicators for transport in communicator.closed_in_order]
        if not private:
            return
        name = private[0].name
        with suppress(CommunicationError):
            all_reduce_max(self.world, [0], f"closing the {name} groups")  # a barrier, which raises if a rank is gone
            try:
                for transport in private:
                    transport.close()
            except TransportError as error:
                warn_user(f"torchbagua: {error}; {name}'s groups are broken off")

    def close(self) -> None:
        """Close the private groups, whatever is under way. This breaks off the operations of GPUs."""
        for communicator in self._communicators:
            communicator.close()
        for communicator in self._communicators:  # when all are broken off, since one may wait for another
            communicator.join()

    @property
    def _communicators(self) -> list[Communicator]:
        all_or_none = (self.world, self.intra_node, self.inter_node, self._gradients)
        return [communicator for communicator in all_or_none if communicator is not None]
