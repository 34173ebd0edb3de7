"""Which transport moves the tensors of each type of devices, among ranks of a torch group."""

from dataclasses import replace
from functools import partial

import torch.distributed as dist

from torchbagua._torch import backend_of, is_nccl
from torchbagua.transport.base import Abilities, Members, Transport, TransportMaker
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
    """

    def __init__(self, process_group: dist.ProcessGroup, given: TransportMaker | None) -> None:
        self._given = given
        self._process_group = process_group
        self._has_nccl = has_nccl(process_group)
        self._shares_nccl = False
        backends = backend_names(process_group)
        self._others = {device: name for device, name in backends.items() if name not in ("gloo", "nccl")}

    def open(self, members: Members) -> dict[str, Transport]:
        """Return transports of these members, by the types of devices whose tensors they move.

        All ranks of the group use its own NCCL, on which training launches too.
        """
        own = {} if self._given is None else self._open_given(members)
        for device_type, name in self._others.items():
            if device_type not in own:
                store = dist.PrefixStore(f"{name} for {device_type}", members.store)
                own[device_type] = TorchBackendTransport(replace(members, store=store), device_type)
        host = own.get("cpu") or GlooTransport(members)
        transports = {"cpu": host, **own}
        if "cuda" in transports:
            return transports
        if not self._has_nccl:
            if host.abilities.has_messages:
                transports["cuda"] = StagedTransport(host, members.timeout)
        elif members.size == self._process_group.size():
            self._shares_nccl = True
            transports["cuda"] = NcclTransport(self._process_group)
        else:
            transports["cuda"] = self._private_nccl(members)
        return transports

    def open_beside_training(self, members: Members) -> dict[str, Transport]:
        """Return transports for another thread than the one that trains, in place of those that it launches on.

        The training thread launches on the user's group. What another thread launched there would come between, in
        another place on each rank.
        """
        if not self._shares_nccl:
            return {}
        warn_of_launch_order()
        return {"cuda": self._private_nccl(members)}

    def open_in_stream_order(self, members: Members) -> dict[str, Transport]:
        """Return private transports that move tensors in stream order; none if the host moves all."""
        return {"cuda": self._private_nccl(members)} if self._shares_nccl else {}

    def within(self, part: Members) -> TransportMaker | None:
        """Return the `given` of a group that is made by hand of `part`, so that it sends as this group does."""
        maker = self._given
        if maker is None and self._others:
            accelerators = [device_type for device_type in self._others if device_type != "cpu"]
            maker = partial(TorchBackendTransport, device_type=accelerators[0] if accelerators else "cpu")
        if maker is None:
            return None

        def open_within(members: Members) -> Transport:
            ranks, global_ranks = (
                tuple(numbers[rank] for rank in members.ranks) for numbers in (part.ranks, part.global_ranks)
            )
            return maker(replace(members, process_group=part.process_group, ranks=ranks, global_ranks=global_ranks))

        return open_within

    def _private_nccl(self, members: Members) -> PrivateNcclTransport:
        return PrivateNcclTransport(replace(members, store=dist.PrefixStore("nccl", members.store)))

    def _open_given(self, members: Members) -> dict[str, Transport]:
        assert self._given is not None
        transport = self._given(replace(members, store=dist.PrefixStore("given", members.store)))
        abilities, name = getattr(transport, "abilities", None), getattr(transport, "name", None)
        if not isinstance(abilities, Abilities) or not isinstance(name, str):
            raise TypeError(
                "BaguaProcessGroup: transport must return a torchbagua.transport.Transport with a name and Abilities, "
                f"got {transport!r} with the name {name!r} and the abilities {abilities!r}"
            )
        return dict.fromkeys(abilities.devices, transport)


def has_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether NCCL is what moves tensors of GPUs in this group."""
    return is_nccl(backend_of(process_group, "cuda"))
