"""The private gloo connections of a communicator: among all of its ranks, or one by one to those it talks to."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from torchbagua._torch import backend_of, gloo_devices
from torchbagua.transport.base import TransportError
from torchbagua.transport.errors import cause_of
from torchbagua.transport.private_groups import gloo_group
from torchbagua.transport.store_requests import missing_ranks, read_texts, say_opens, write_text

MOST_CONNECTED_AT_ONCE = 32
"""In a larger group a rank is connected to another one when it has something for it, or for all.

In a smaller one all connect when it is opened, so that a rank which ends before its first message is noticed at once.
"""

_READY, _GAVE_UP = "ready", "gave up"


class Failure(NamedTuple):
    """A peer that could not be connected, and why."""

    peer: int
    cause: str


class Connections:
    """The gloo group of all ranks, the mesh, which takes a socket for each of them; and links, gloo groups of two.

    A link takes a socket and a thread. gloo could connect the ranks of one group at their first message, with no more
    sockets (`lazy_init`). But then closing the group freezes the process, if bytes arrive that nobody receives any
    more; of two ranks, one waits for the other for five timeouts, and is not notified of its end; and if the other one
    comes after that, gloo ends the process (torch 2.13).

    Two ranks send over their link, if they have one, and else over the mesh: both know the same of it, since exchanges
    come in the same order on all ranks.

    Args:
        store: has keys of these connections alone.
        rank, size: of the communicator.
        timeout: bound on every wait.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._links: dict[int, dist.ProcessGroup] = {}
        self._devices: Sequence[Any] = ()  # of all links
        self._ready: dist.Store | None = None
        self.mesh: dist.ProcessGroup | None = None
        self._mesh_backend: Any = None  # kept, since to ask the group takes longer than to post a message
        self.is_closed = False

    @property
    def linked_peers(self) -> set[int]:
        """The ranks to which this one has a link."""
        return set(self._links)

    def open_mesh(self) -> None:
        """Connect all ranks, unless they are. Collective.

        Raises:
            RuntimeError: they could not be connected within the timeout; names the ranks that did not come.
        """
        if self.mesh is not None or self.is_closed:
            return
        say_opens(self._store, self._rank)
        try:
            mesh = gloo_group(self._store, self._rank, self._size, self._timeout)
        except RuntimeError as error:
            missing = missing_ranks(self._store, self._size)
            if not missing:
                raise
            raise RuntimeError(f"ranks {missing} did not come: {cause_of(error)}") from error
        if not self.is_closed:  # by another thread
            self._mesh_backend = backend_of(mesh)  # first: a twin that sees the mesh asks for it
            self.mesh = mesh

    def connect(self, peers: Iterable[int]) -> Failure | None:
        """Make links to those of `peers` to which there is no connection; they do it too, in the same exchange.

        Returns:
            what went wrong; no error, whose traceback would hold connections open that are to be closed then.
        """
        if self.mesh is not None:
            return None
        new = sorted({*peers} - self._links.keys() - {self._rank})
        if not new:
            return None
        if self.is_closed:
            return Failure(new[0], "the group is closed")
        if self._ready is None:
            # A connection of its own to the store: who waits over the other one holds it meanwhile.
            self._ready = dist.PrefixStore("ready", self._store.clone())  # type: ignore[attr-defined]
        ready = self._ready
        try:
            return self._meet(new, ready) or self._make_links(new, ready)
        except RuntimeError as error:  # of the store
            return Failure(new[0], cause_of(error))

    def to(self, peer: int) -> tuple[Any, int]:
        """Return what sends to and receives from `peer`, and its number there. They are connected.

        Raises:
            TransportError: another thread has closed the connections.
        """
        link = self._links.get(peer)
        if link is not None:
            return backend_of(link), int(peer > self._rank)
        backend = self._mesh_backend
        if backend is None:  # another thread has closed it
            raise TransportError("the group is closed", peer)
        return backend, peer

    def close(self) -> None:
        """Close all connections. What holds a work of theirs keeps them open."""
        self.is_closed = True
        self.mesh = self._mesh_backend = self._ready = None
        self._links.clear()
        self._devices = ()

    def _meet(self, peers: list[int], ready: dist.Store) -> Failure | None:
        """Say that this rank is ready to connect to `peers`, and wait until all of them have said so.

        gloo's own wait would take a peer for present that gave up before this rank came.
        """
        own = [f"{self._rank} to {peer}" for peer in peers]
        theirs = [f"{peer} to {self._rank}" for peer in peers]
        write_text(ready, own, _READY)
        failure = None
        try:
            ready.wait(theirs, self._timeout)
        except RuntimeError:
            missing = [peer for peer, key in zip(peers, theirs, strict=True) if not ready.check([key])]
            if not missing:  # but the store has failed
                raise
            seconds = self._timeout.total_seconds()
            failure = Failure(missing[0], f"timed out after {seconds:g} s waiting for it to connect")
        else:
            words = read_texts(ready, theirs)
            if late := [peer for peer, word in zip(peers, words, strict=True) if word != _READY]:
                failure = Failure(late[0], "it gave up waiting for this rank, or for another one, to connect")
        if failure is not None:
            with suppress(RuntimeError):
                write_text(ready, own, _GAVE_UP)
        return failure

    def _make_links(self, peers: list[int], ready: dist.Store) -> Failure | None:
        devices = self._devices = self._devices or gloo_devices()
        # Ranks a and b come together in turn (a + b) mod n, in which neither has another one: so no two wait for each
        # other in a circle.
        for peer in sorted(peers, key=lambda peer: (peer + self._rank) % self._size):
            store = dist.PrefixStore(f"{min(peer, self._rank)} and {max(peer, self._rank)}", ready)
            own_number = int(self._rank > peer)
            try:
                link = gloo_group(store, own_number, 2, self._timeout, devices=devices)
            except RuntimeError as error:
                return Failure(peer, cause_of(error))
            if self.is_closed:  # by another thread
                return Failure(peer, "the group is closed")
            self._links[peer] = link
        return None
