"""The transport for CPU tensors over private gloo connections."""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchbagua.transport.base import COLLECTIVES, Abilities, Members, TransportError
from torchbagua.transport.connections import MOST_CONNECTED_AT_ONCE, Connections
from torchbagua.transport.errors import cause_of
from torchbagua.transport.torch_groups import Direction, MessageWorks, TorchGroupCollectives


class GlooTransport(MessageWorks, TorchGroupCollectives):
    """Sends messages between CPUs.

    The connections are private because DDP communicates on the user's group from its own thread, and two threads that
    use one gloo group can deadlock. gloo cannot abort a call: a wait in progress on another thread keeps the
    connections open until it ends.
    """

    name = "gloo"
    abilities = Abilities(frozenset({"cpu"}), has_torch_group=True, collectives=COLLECTIVES - {"all_to_all"})

    def __init__(self, members: Members) -> None:
        super().__init__()
        self.connections = Connections(members.store, members.rank, members.size, members.timeout)
        self._size = members.size

    @property
    def is_closed(self) -> bool:
        return self.connections.is_closed

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

    def twin(self) -> "GlooTransport":
        self.torch_group()  # two threads on each of two ranks have no common order in which to connect
        twin = copy.copy(self)
        twin._works = {}
        return twin

    def interrupt(self) -> None:
        self.connections.interrupt()

    def abort(self) -> None:
        self.connections.close()
        self._works.clear()

    def _start(self, direction: Direction, peer: int, tensor: torch.Tensor, tag: int) -> dist.Work:
        # Call the backend directly: the torch group's methods go through the dispatcher, which costs time.
        backend, number = self.connections.to(peer)
        post = backend.send if direction == "send" else backend.recv
        work: dist.Work = post([tensor], number, tag)
        return work
