"""One private gloo group, and the exchanges that its ranks make."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.collectives.exchange import CommunicationError, Exchange
from torchbagua.events import CommEvent, Observer

_CPU = torch.device("cpu")


class Communicator:
    """A group of ranks that exchange tensors among themselves and nobody else on these connections.

    The gloo group is private (DDP communicates on the user's group from its own thread, and two users of one gloo group
    can deadlock), and every use must come in the same order on all its ranks: one lane, one thread.

    Args:
        store: the key-value store that all `ranks` share; `name` is the prefix of this group's keys in it.
        name: unique to this group, the same on all its ranks.
        rank: own index in `ranks`.
        ranks: the members, as ranks of the user's group; they name the peers in errors.
        scope: "world", "intra_node" or "inter_node", for events and errors.
        timeout: bound on every wait.
        observers: hear of every exchange.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        rank: int,
        ranks: Sequence[int],
        scope: str,
        timeout: timedelta,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.scope = scope
        self.observers = tuple(observers)
        # What is posted and not waited for, by tag, direction and peer. Here and not in the exchanges, because a work
        # holds the connections open, and `close` must end them.
        self.works: dict[tuple[int, str, int], dist.Work] = {}
        self._process_group: dist.ProcessGroup | None = _gloo_group(
            dist.PrefixStore(name, store), rank, len(ranks), timeout
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch group, for operations of one's own. Raises CommunicationError once it is closed."""
        if self._process_group is None:
            raise CommunicationError(f"torchbagua: the {self.scope} group of ranks {list(self.ranks)} is closed")
        return self._process_group

    @property
    def backend(self) -> Any:  # torch's stubs (2.13) do not know that a Backend has send and recv
        """The gloo backend itself: the torch group's methods take a detour through the dispatcher."""
        return self.process_group._get_backend(_CPU)

    def rank_before(self, distance: int) -> int:
        """Return the rank `distance` places before own, around the ring."""
        return (self.rank - distance) % self.size

    def rank_after(self, distance: int) -> int:
        """Return the rank `distance` places after own, around the ring."""
        return (self.rank + distance) % self.size

    def tell(self, event: CommEvent) -> None:
        """Tell the observers of an exchange."""
        for observer in self.observers:
            observer.on_comm(event)

    def close(self) -> None:
        """Close the connections; peers that still wait for this rank get an error at once."""
        self._process_group = None
        self.works.clear()

    def all_to_all(self, receives: Sequence[torch.Tensor], *, bucket: str) -> Exchange:
        """Start an exchange that fills `receives[r]` with what every other rank r sends to this one."""
        return Exchange(self, "all_to_all", 0, receives, bucket)

    def all_gather(self, receives: Sequence[torch.Tensor], *, bucket: str) -> Exchange:
        """Start an exchange that fills `receives[r]` with the one tensor that every other rank r sends to all."""
        return Exchange(self, "all_gather", 1, receives, bucket)


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group that torch's registry does not know: `new_group` wants the whole world to take part."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return group
