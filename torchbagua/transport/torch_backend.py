"""The transport over any torch.distributed backend (xccl, hccl, ucc, mpi and others), by torch's public calls."""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import registered_group
from torchbagua.transport.base import (
    COLLECTIVES,
    LONGEST_ABORT_S,
    TORCH_ERRORS,
    Abilities,
    Direction,
    Members,
    MessageWorks,
    MissingOperation,
    TransportError,
    backend_names,
    bytes_of,
)
from torchbagua.transport.errors import cause_of
from torchbagua.transport.store_requests import StoreRequests

# Both names are one function; torch 2.13 warns about the older one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TorchBackendTransport(MessageWorks):
    """Sends tensors over a private group with the backend that `process_group` has for the device type.

    Between CPUs it sends messages. On other devices each exchange is one collective: there a backend runs all messages
    between two ranks in the order of one stream, so two ranks that both send first would deadlock.

    The host waits for every operation. The timeout bounds this wait if the backend is gloo; other backends may ignore
    it.
    """

    def __init__(self, members: Members, device_type: str = "cpu", has_messages: bool | None = None) -> None:
        super().__init__()
        self.name = _backend_for(members, device_type)
        self.abilities = Abilities(
            frozenset({device_type}),
            has_messages=device_type == "cpu" if has_messages is None else has_messages,
            has_deadline=self.name == "gloo",
            has_collective_close=device_type != "cpu",
            has_torch_group=True,
            collectives=COLLECTIVES,
        )
        self._members = members
        self._requests = StoreRequests(members.store, members.timeout)
        self._device_type = device_type
        self._device = torch.device(device_type)
        self._group: dist.ProcessGroup | None = None
        self._is_closed = False
        self._num_twins = 0
        self._destruction: threading.Thread | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def open(self) -> None:
        self.torch_group()

    def connect(self, peers: Iterable[int] | None) -> None:
        self.torch_group()

    def use_device(self, device: torch.device) -> None:
        self._device = device

    def missing_operation(self) -> MissingOperation | None:
        if self._members.size == 1:
            return None
        group, probes = self.torch_group(), self._probes()

        def start(operation: str) -> None:
            self._works[operation] = probes[operation](group)

        def wait(operation: str) -> None:
            work, _ = self._works.pop(operation)
            if work is not None:
                work.wait()

        # No rank waits for an operation that another rank could not start.
        return self._find_failure("started", probes, start) or self._find_failure("done", probes, wait)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        sent = torch.cat([bytes_of(tensor) for tensor in inputs])
        sent_lengths, lengths = ([tensor.nbytes for tensor in tensors] for tensors in (inputs, outputs))
        received = sent.new_empty(sum(lengths))
        self._run(
            lambda group: dist.all_to_all_single(received, sent, lengths, sent_lengths, group=group, async_op=True)
        )
        for output, part in zip(outputs, received.split(lengths), strict=True):
            bytes_of(output).copy_(part)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._run(lambda group: dist.all_to_all_single(output, input, group=group, async_op=True))

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        separate = own.clone()  # not every backend accepts a part of the output as input
        self._run(lambda group: _all_gather(output, separate, group=group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._run(lambda group: dist.all_reduce(tensor, group=group, async_op=True))

    def torch_group(self) -> dist.ProcessGroup:
        if self._is_closed:
            raise TransportError("the group is closed")
        if self._group is None:
            try:
                group = self._make_group()
            except TORCH_ERRORS as error:
                cause = self._requests.cause_of_failed_open(error, self._members.size)
                raise TransportError(cause) from error
            if self._is_closed:  # by another thread
                _destroy(group, {})
                raise TransportError("the group is closed")
            self._group = group
        return self._group

    def twin(self) -> "TorchBackendTransport":
        self._num_twins += 1
        store = dist.PrefixStore(f"twin {self._num_twins}", self._members.store)
        twin = TorchBackendTransport(
            replace(self._members, store=store), self._device_type, self.abilities.has_messages
        )
        twin.open()
        return twin

    def close(self) -> None:
        try:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
        except RuntimeError as error:
            raise TransportError(cause_of(error)) from error
        finally:
            self.abort()

    def abort(self) -> None:
        self._is_closed = True
        works, self._works = self._works, {}
        group, self._group = self._group, None
        if group is None:
            return
        if self.abilities.has_deadline:
            _destroy(group, works)
        else:  # the destruction may wait for operations in flight
            name = f"torchbagua: end of a group of {self.name}"
            self._destruction = threading.Thread(target=_destroy, args=(group, works), name=name, daemon=True)
            self._destruction.start()

    def join(self) -> None:
        if self._destruction is not None:
            self._destruction.join(LONGEST_ABORT_S)

    def _make_group(self) -> dist.ProcessGroup:
        members, requests = self._members, self._requests
        requests.announce("opens", members.rank)
        if members.rank == 0:
            requests.set("name", f"torchbagua {secrets.token_hex(8)}")
        requests.wait(["name"], members.timeout)
        name = requests.get("name")

        def create(store: dist.Store) -> dist.ProcessGroup:
            own = dist.PrefixStore("backend", store)
            return registered_group(members.global_ranks, members.rank, self.name, own, name, members.timeout)

        # Another backend may need this thread, whose device it uses.
        return requests.open_group(create) if self.abilities.has_deadline else create(members.store)

    def _probes(self) -> Mapping[str, Callable[[dist.ProcessGroup], tuple[Any, object]]]:
        """Return calls of this transport's operations on a few bytes. A call returns a work and its tensors."""
        rank, size = self._members.rank, self._members.size
        sent, received, sent_row, received_row = (
            torch.zeros(length, dtype=torch.uint8, device=self._device) for length in (1, 1, size, size)
        )
        if self.abilities.has_messages:
            return {
                "irecv": lambda group: (dist.irecv(received, group=group, group_src=(rank - 1) % size), received),
                "isend": lambda group: (dist.isend(sent, group=group, group_dst=(rank + 1) % size), sent),
            }
        lengths, total = [1] * size, sent.float()
        return {
            "all_to_all_single": lambda group: (
                dist.all_to_all_single(received_row, sent_row, lengths, lengths, group=group, async_op=True),
                (received_row, sent_row),
            ),
            "all_gather_into_tensor": lambda group: (
                _all_gather(received_row, sent, group=group, async_op=True),
                (received_row, sent),
            ),
            "all_reduce": lambda group: (dist.all_reduce(total, group=group, async_op=True), total),
        }

    def _find_failure(
        self, stage: str, operations: Iterable[str], attempt: Callable[[str], None]
    ) -> MissingOperation | None:
        """Attempt the operations, and return one that failed on a rank; all ranks return the same. Collective."""
        requests = StoreRequests(dist.PrefixStore(stage, self._members.store), self._members.timeout)
        failure = None
        for operation in operations:
            try:
                attempt(operation)
            except Exception as error:  # any kind: third-party backends raise errors of various types
                failure = json.dumps([operation, cause_of(error)])
                break
        try:
            if failure is not None:
                requests.set("failure", failure)
            if requests.add("ranks", 1) == self._members.size:
                requests.set("all", "")
            requests.wait(["all"], self._members.timeout)
            if requests.check(["failure"]):
                return MissingOperation(self.name, *json.loads(requests.get("failure")))
            return None
        except RuntimeError as error:
            raise TransportError(f"waiting for all ranks to try its operations: {cause_of(error)}") from error

    def _start(self, direction: Direction, peer: int, tensor: torch.Tensor, tag: int) -> dist.Work | None:
        data = bytes_of(tensor)  # every backend supports bytes, and not every backend supports bfloat16
        if direction == "send":
            return dist.isend(data, group=self.torch_group(), tag=tag, group_dst=peer)
        return dist.irecv(data, group=self.torch_group(), tag=tag, group_src=peer)

    def _run(self, start: Callable[[dist.ProcessGroup], Any]) -> None:
        try:
            work = start(self.torch_group())
            if work is not None:
                work.wait()
        except TransportError:
            raise
        except TORCH_ERRORS as error:
            raise TransportError(cause_of(error)) from error


def _backend_for(members: Members, device_type: str) -> str:
    """Return the name of the backend for a device type; raise ValueError if a private group with it is impossible."""
    subject = "TorchBackendTransport: process_group must"
    names = backend_names(members.process_group)
    available = ", ".join(f"{name} for {each_type}" for each_type, name in names.items()) or "none"
    try:
        dist.get_process_group_ranks(members.process_group)
    except KeyError:
        raise ValueError(
            f"{subject} be a group that torch.distributed.init_process_group or new_group returned, got a manually "
            f"constructed group with {available}; private groups of its ranks are created by backend name"
        ) from None
    if device_type not in names:
        raise ValueError(f"{subject} have a backend for tensors on {device_type}, got {available}")
    if names[device_type] == "mpi" and members.size != dist.get_world_size():
        raise ValueError(
            f"{subject} have all ranks of the job with mpi, because only all of them can create an mpi group, got "
            f"{members.size} of {dist.get_world_size()}; for ranks on several nodes, use "
            "BaguaProcessGroup(group, nodes=[0] * group.size())"
        )
    return names[device_type]


def _destroy(group: dist.ProcessGroup, works: dict[object, tuple[dist.Work | None, object]]) -> None:
    # The whole world may already have been destroyed. If the group is written in Python, torch cannot find its name
    # after it has removed the group (torch 2.13).
    with suppress(*TORCH_ERRORS):
        dist.destroy_process_group(group)
    tensors = [tensor for _, tensor in works.values()]
    works.clear()
    tensors.clear()  # last: a work that still exists may write to its tensor
