"""The transport for CPU tensors over private gloo connections."""

import atexit
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import backend_of, gloo_devices, gloo_options, unregistered_group
from torchbagua.transport.base import (
    COLLECTIVES,
    MOST_CONNECTED_AT_ONCE,
    Abilities,
    Direction,
    Members,
    MessageWorks,
    TorchGroupCollectives,
    TransportError,
)
from torchbagua.transport.errors import cause_of
from torchbagua.transport.store_requests import StoreRequests

_GLOO_RELEASE_S = 0.05

# One for each interface in GLOO_SOCKET_IFNAME, of which each has its own connections, and serves every n-th tag.
_UNUSED_TAGS = range((1 << 31) - 8, 1 << 31)

_READY, _GAVE_UP = "ready", "gave up"


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, devices: Sequence[Any] | None = None
) -> dist.ProcessGroup:
    """Return a gloo group for CPU tensors. Collective."""
    _wait_at_exit_for_gloo()
    own = devices is None
    options = gloo_options(timeout, gloo_devices() if devices is None else devices, num_threads=2 if own else 1)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    return unregistered_group(store, rank, size, "cpu", dist.ProcessGroup.BackendType.GLOO, backend)


def end_waits(backend: Any, peer: int) -> None:
    """End all waits of a gloo group, here and on its peers, with an error.

    gloo cannot abort (torch 2.13: `abort` does nothing). But a wait that times out closes the connections to all peers.
    """
    for tag in _UNUSED_TAGS:
        with suppress(RuntimeError):
            backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))


@functools.cache
def _wait_at_exit_for_gloo() -> None:
    # After the wait for a collective returns, a gloo thread releases the collective's tensors, which requires the GIL.
    # Once the interpreter shuts down, the thread cannot get the GIL, and the process aborts ("terminate called without
    # an active exception"). Whether the thread is done cannot be queried, so the exit waits. Plain torch aborts too, if
    # a group outlives destroy_process_group (a DDP references it) and the program ends right after a collective.
    atexit.register(time.sleep, _GLOO_RELEASE_S)


class Connections:
    """The mesh, a gloo group of all ranks with a socket for each rank; and links, gloo groups of two ranks.

    A link uses a socket and a thread. gloo could instead connect the ranks of one group at their first message, with
    the same number of sockets (`lazy_init`). But then closing the group freezes the process if bytes arrive that no
    rank receives any more. Also, one of two ranks waits five timeouts for the other, and is not notified if that rank
    dies; if the other rank connects after that, gloo kills the process (torch 2.13).

    Two ranks send over their link, if they have one, and over the mesh otherwise. Both make the same choice, since
    exchanges have the same order on all ranks.

    Attributes:
        links: by the rank to which they lead.
        mesh: None until all ranks are connected, and once they are closed.
    """

    mesh: dist.ProcessGroup | None = None
    is_closed = False
    _mesh_backend: Any = None  # cached: asking the group takes longer than posting a message
    _devices: Sequence[Any] = ()  # shared by all links
    _ready: StoreRequests | None = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._requests = StoreRequests(store, timeout)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self.links: dict[int, dist.ProcessGroup] = {}
        self._process = os.getpid()

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Any = ctypes.pythonapi.Py_IncRef) -> None:
        # In a forked process, which lacks gloo's threads, the destruction of a group would wait for them for ever.
        # The arguments exist at the exit of the interpreter too.
        if getpid() != self._process:
            for group in (self.mesh, *self.links.values()):
                keep(ctypes.py_object(group))

    def all_ranks(self) -> dist.ProcessGroup:
        """Return the mesh. If there is none yet, connect all ranks, which is collective."""
        if self.mesh is None and not self.is_closed:
            try:
                self._requests.announce("opens", self._rank)
                mesh = self._requests.open_group(lambda store: gloo_group(store, self._rank, self._size, self._timeout))
            except RuntimeError as error:
                raise TransportError(self._requests.cause_of_failed_open(error, self._size)) from error
            if not self.is_closed:  # by another thread
                self._mesh_backend = backend_of(mesh)  # set first: a twin that sees the mesh reads it
                self.mesh = mesh
        if (opened := self.mesh) is None:
            raise TransportError("the group is closed")
        return opened

    def connect(self, peers: Iterable[int]) -> None:
        """Open links to the unconnected ranks of `peers`. The peers do the same, in the same exchange."""
        if self.mesh is not None:
            return
        new = sorted({*peers} - self.links.keys() - {self._rank})
        if not new:
            return
        if self.is_closed:
            raise TransportError("the group is closed", new[0])
        try:
            # A waiting thread occupies the other connection to the store.
            ready = self._ready = self._ready or self._requests.clone("ready")
            self._meet(new, ready)
            self._make_links(new, ready)
        except TransportError:
            raise
        except RuntimeError as error:  # from the store
            raise TransportError(cause_of(error), new[0]) from error

    def to(self, peer: int) -> tuple[Any, int]:
        """Return the backend for messages to and from `peer`, and the peer's rank in it. The two are connected."""
        link = self.links.get(peer)
        if link is not None:
            return backend_of(link), int(peer > self._rank)
        backend = self._mesh_backend
        if backend is None:  # another thread has closed the mesh
            raise TransportError("the group is closed", peer)
        return backend, peer

    def interrupt(self) -> None:
        """End the waits of other threads, here and on the peers."""
        for peer, link in [*self.links.items()]:
            end_waits(backend_of(link), int(peer > self._rank))
        if (mesh := self._mesh_backend) is not None and self._size > 1:
            end_waits(mesh, (self._rank + 1) % self._size)

    def close(self) -> None:
        """Close all connections. A reference to one of their works keeps them open."""
        self.is_closed = True
        self.mesh = self._mesh_backend = self._ready = None
        self.links.clear()
        self._devices = ()

    def _meet(self, peers: list[int], ready: StoreRequests) -> None:
        """Announce that this rank is ready to connect to `peers`, and wait until all of them have done the same.

        gloo's own wait would treat a peer as present that gave up before this rank arrived.
        """
        own_keys = [f"{self._rank} to {peer}" for peer in peers]
        peer_keys = [f"{peer} to {self._rank}" for peer in peers]
        ready.write_text(own_keys, _READY)
        try:
            ready.wait(peer_keys, self._timeout)
            words = ready.read_texts(peer_keys)
            late = [peer for peer, word in zip(peers, words, strict=True) if word != _READY]
            cause = "it gave up waiting for this rank or another rank to connect"
        except RuntimeError:
            late = [peer for peer, key in zip(peers, peer_keys, strict=True) if not ready.check([key])]
            if not late:  # the store failed
                raise
            cause = f"timed out after {self._timeout.total_seconds():g} s waiting for it to connect"
        if late:
            with suppress(RuntimeError):
                ready.write_text(own_keys, _GAVE_UP)
            raise TransportError(cause, late[0])

    def _make_links(self, peers: list[int], ready: StoreRequests) -> None:
        devices = self._devices = self._devices or gloo_devices()
        # Ranks a and b connect in turn (a + b) mod n, in which neither has another peer, so there is no circular wait.
        for peer in sorted(peers, key=lambda peer: (peer + self._rank) % self._size):
            key = f"{min(peer, self._rank)} and {max(peer, self._rank)}"
            own_number = int(self._rank > peer)

            def connect(store: dist.Store, key: str = key, own_number: int = own_number) -> dist.ProcessGroup:
                return gloo_group(dist.PrefixStore(key, store), own_number, 2, self._timeout, devices=devices)

            try:
                link = ready.open_group(connect)
            except RuntimeError as error:
                raise TransportError(cause_of(error), peer) from error
            if self.is_closed:  # by another thread
                raise TransportError("the group is closed", peer)
            self.links[peer] = link


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
            self.torch_group()

    def connect(self, peers: Iterable[int] | None) -> None:
        if peers is None:
            self.torch_group()
        else:
            self.connections.connect(peers)

    def torch_group(self) -> dist.ProcessGroup:
        return self.connections.all_ranks()

    def twin(self) -> "GlooTransport":
        self.torch_group()  # two threads on each of two ranks have no common order in which to connect
        return self.with_separate_works()

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
