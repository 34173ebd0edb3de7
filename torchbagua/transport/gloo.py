"""Tensors of the CPU over private gloo connections."""

import copy
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist

from torchbagua.transport.base import COLLECTIVES, Abilities, Members, TransportError
from torchbagua.transport.connections import MOST_CONNECTED_AT_ONCE, Connections
from torchbagua.transport.errors import cause_of
from torchbagua.transport.torch_groups import TorchGroupCollectives

_Direction = Literal["send", "receive"]


class GlooTransport(TorchGroupCollectives):
    """Messages between CPUs.

    The connections are private: DDP communicates on the user's group from its own thread, and two users of one gloo
    group can deadlock. gloo cannot abort a call: a wait that is under way on another thread keeps the connections open
    until it ends.
    """

    name = "gloo"
    abilities = Abilities(frozenset({"cpu"}), has_torch_group=True, collectives=COLLECTIVES - {"all_to_all"})

    def __init__(self, members: Members) -> None:
        self.connections = Connections(members.store, members.rank, members.size, members.timeout)
        self._size = members.size
        # A work holds the connections open, so works are kept where `abort` ends them.
        self._works: dict[tuple[int, _Direction, int], dist.Work] = {}

    def open(self) -> None:
        if self._size <= MOST_CONNECTED_AT_ONCE:
            self.connect(None)

    def connect(self, peers: Iterable[int] | None) -> None:
        if peers is None:
            self.torch_group()
            return
        failure = self.connections.connect(peers)
        if failure is not None:
            raise TransportError(failure.cause, failure.peer)

    def torch_group(self) -> dist.ProcessGroup:
        try:
            self.connections.open_mesh()
        except RuntimeError as error:
            raise TransportError(cause_of(error)) from error
        mesh = self.connections.mesh
        if mesh is None:
            raise TransportError("the group is closed")
        return mesh

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._post("send", peer, tensor, tag)

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._post("receive", peer, tensor, tag)

    def wait_send(self, peer: int, tag: int) -> None:
        self._wait("send", peer, tag)

    def wait_receive(self, peer: int, tag: int) -> None:
        self._wait("receive", peer, tag)

    def twin(self) -> "GlooTransport":
        self.torch_group()  # two threads cannot agree with two of another rank on who connects to whom first
        twin = copy.copy(self)
        twin._works = {}
        return twin

    def abort(self) -> None:
        self.connections.close()
        self._works.clear()

    def _post(self, direction: _Direction, peer: int, tensor: torch.Tensor, tag: int) -> None:
        key = (tag, direction, peer)
        assert key not in self._works
        # The backend itself: the torch group's methods take a detour through the dispatcher.
        backend, number = self.connections.to(peer)
        post = backend.send if direction == "send" else backend.recv
        try:
            self._works[key] = post([tensor], number, tag)
        except RuntimeError as error:
            raise TransportError(cause_of(error), peer) from error

    def _wait(self, direction: _Direction, peer: int, tag: int) -> None:
        work = self._works.pop((tag, direction, peer), None)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(cause_of(error), peer) from error
        elif self.connections.is_closed:  # by another thread, which has dropped the works
            raise TransportError("the group is closed", peer)
