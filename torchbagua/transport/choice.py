"""Choose the transport for each device type, among the ranks of a torch group.

A transport is imported if a group needs it.
"""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import backend_of, is_nccl, nccl_options
from torchbagua.transport.base import Abilities, Members, Transport, TransportMaker, backend_names
from torchbagua.transport.gloo import GlooTransport
from torchbagua.transport.store_requests import StoreRequests


class TransportChoice:
    """Opens transports for communicators over ranks of one torch group.

    CPU tensors are sent over private gloo connections. GPU tensors are sent over NCCL if the group has NCCL, and
    through host memory otherwise. If the group has another backend for a device type, tensors on these devices are
    sent over a private group with that backend.

    Args:
        process_group: the group.
        given: opens the user's transport, which replaces the default for the device types that it names.
    """

    def __init__(self, process_group: dist.ProcessGroup, given: TransportMaker | None) -> None:
        self._given = given
        self._process_group = process_group
        self._has_nccl = has_nccl(process_group)
        self._shares_nccl = False
        backends = backend_names(process_group)
        self._other_backends = {device: name for device, name in backends.items() if name not in ("gloo", "nccl")}

    def open(self, members: Members) -> dict[str, Transport]:
        """Return transports of these members, by device type.

        If the members are all ranks of the group, they use the group's own NCCL, on which training launches too.
        """
        device_transports = {} if self._given is None else self._open_given(members)
        for device_type, name in self._other_backends.items():
            if device_type not in device_transports:
                from torchbagua.transport.torch_backend import TorchBackendTransport

                store = dist.PrefixStore(f"{name} for {device_type}", members.store)
                device_transports[device_type] = TorchBackendTransport(replace(members, store=store), device_type)
        host = device_transports.get("cpu") or GlooTransport(members)
        transports = {"cpu": host, **device_transports}
        if "cuda" in transports or not self._has_nccl:  # without NCCL, the communicator stages tensors of GPUs
            return transports
        if members.size == self._process_group.size():
            from torchbagua.transport.nccl import NcclTransport

            self._shares_nccl = True
            transports["cuda"] = NcclTransport(self._process_group)
        else:
            transports["cuda"] = self._private_nccl(members)
        return transports

    @property
    def shares_users_group(self) -> bool:
        """Whether `open` has returned transports that launch on the user's NCCL."""
        return self._shares_nccl

    def open_for_another_thread(self, members: Members) -> dict[str, Transport]:
        """Return transports for a thread other than the training thread; they replace the transports that both share.

        The training thread launches on the user's group. Operations that another thread launched on that group would
        interleave with them in a different order on each rank.
        """
        if not self._shares_nccl:
            return {}
        from torchbagua.transport.nccl import warn_of_launch_order

        warn_of_launch_order()
        return {"cuda": self._private_nccl(members)}

    def open_in_stream_order(self, members: Members) -> dict[str, Transport]:
        """Return private transports that send tensors in stream order; none if all tensors are sent by the host."""
        return {"cuda": self._private_nccl(members)} if self._shares_nccl else {}

    def within(self, part: Members) -> TransportMaker | None:
        """Return the `given` of a group built from `part`, so that it uses the same transport as this group."""
        maker = self._given
        if maker is None and self._other_backends:
            from torchbagua.transport.torch_backend import TorchBackendTransport

            accelerators = [device_type for device_type in self._other_backends if device_type != "cpu"]
            maker = partial(TorchBackendTransport, device_type=accelerators[0] if accelerators else "cpu")
        if maker is None:
            return None

        def open_within(members: Members) -> Transport:
            ranks, global_ranks = (
                tuple(numbers[rank] for rank in members.ranks) for numbers in (part.ranks, part.global_ranks)
            )
            return maker(replace(members, process_group=part.process_group, ranks=ranks, global_ranks=global_ranks))

        return open_within

    def _private_nccl(self, members: Members) -> Transport:
        from torchbagua.transport.nccl import PrivateNcclTransport

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
    """Return whether this group uses NCCL for GPU tensors."""
    return is_nccl(backend_of(process_group, "cuda"))


def default_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """Return backends with their kinds, by device type: gloo for CPUs, and NCCL if it and a GPU are available."""
    kinds = dist.ProcessGroup.BackendType
    requests = StoreRequests(store, timeout)
    gloo = requests.open_group(lambda store: dist.ProcessGroupGloo(store, rank, size, timeout))
    backends: dict[str, Any] = {"cpu": (kinds.GLOO, gloo)}
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        backends["cuda"] = (kinds.NCCL, nccl)
    return backends
