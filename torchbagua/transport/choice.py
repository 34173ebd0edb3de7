"""Which transport moves the tensors of each type of devices, among ranks of a torch group."""

from dataclasses import replace

import torch.distributed as dist

from torchbagua.transport.base import Members, Transport, TransportMaker
from torchbagua.transport.gloo import GlooTransport
from torchbagua.transport.nccl import NcclTransport, PrivateNcclTransport, warn_of_launch_order
from torchbagua.transport.staged import StagedTransport
from torchbagua.transport.torch_backend import TorchBackendTransport, backend_names


class TransportChoice:
    """Opens transports for communicators over ranks of one torch group.

    Tensors of the CPU go over private gloo connections. Tensors of GPUs go over NCCL if the group has it, else through
    the host's memory. If the group has another backend for a type of devices, tensors there go over a private group
    with that backend.

    Args:
        process_group: the group.
        given: opens a transport that takes the place of these, for the types of devices that it names.

    Attributes:
        given: the same.
    """

    def __init__(self, process_group: dist.ProcessGroup, given: TransportMaker | None) -> None:
        self.given = given
        self._process_group = process_group
        self._backends = backend_names(process_group)
        self._has_nccl = self._backends.get("cuda") == "nccl"

    def open(self, members: Members) -> dict[str, Transport]:
        """Return transports of these members, by the types of devices whose tensors they move.

        All ranks of the group use its own NCCL, on which training launches too.
        """
        own = self._of_other_backends(members)
        if self.given is not None:
            own |= self._given_to(members)
        host = own.get("cpu") or GlooTransport(members)
        on_gpu: Transport
        if not self._has_nccl:
            on_gpu = StagedTransport(host, members.timeout)
        elif members.size == self._process_group.size():
            on_gpu = NcclTransport(self._process_group)
        else:
            on_gpu = self._private_nccl(members)
        return {"cpu": host, "cuda": on_gpu, **own}

    def open_beside_training(self, members: Members) -> dict[str, Transport]:
        """Return transports for another thread than the one that trains, in place of those that it launches on.

        The training thread launches on the user's group. What another thread launched there would come between, in
        another place on each rank.
        """
        if not self._has_nccl or (self.given is not None and "cuda" in self._given_to(members)):
            return {}
        warn_of_launch_order()
        return {"cuda": self._private_nccl(members)}

    def open_in_stream_order(self, members: Members) -> dict[str, Transport]:
        """Return private transports that move tensors in stream order; none if the host moves all."""
        return {"cuda": self._private_nccl(members)} if self._has_nccl else {}

    def _of_other_backends(self, members: Members) -> dict[str, Transport]:
        return {
            device_type: TorchBackendTransport(
                replace(members, store=dist.PrefixStore(f"{name} for {device_type}", members.store)), device_type
            )
            for device_type, name in self._backends.items()
            if name not in ("gloo", "nccl")
        }

    def _private_nccl(self, members: Members) -> PrivateNcclTransport:
        return PrivateNcclTransport(replace(members, store=dist.PrefixStore("nccl", members.store)))

    def _given_to(self, members: Members) -> dict[str, Transport]:
        assert self.given is not None
        transport = self.given(replace(members, store=dist.PrefixStore("given", members.store)))
        return dict.fromkeys(transport.abilities.devices, transport)
