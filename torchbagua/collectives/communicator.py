"""One private gloo group: exchanges in pairwise rounds, with errors that name peer, operation and bucket."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua.events import CommEvent, Observer


class CommunicationError(RuntimeError):
    """An exchange with another rank failed or ran out of time; its group cannot be used any more."""


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

    def close(self) -> None:
        """Close the connections; peers that still wait for this rank get an error at once."""
        self._process_group = None

    def all_to_all(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], *, bucket: str) -> None:
        """Send `sends[r]` to every other rank r and fill `receives[r]` from it; own entries are not touched.

        Sizes may differ from pair to pair, must agree between the two sides of a pair, and may be zero.

        Raises:
            CommunicationError: a peer is gone or did not take part within the timeout.
        """
        self._exchange("all_to_all", sends, receives, bucket)

    def all_gather(self, send: torch.Tensor, receives: Sequence[torch.Tensor], *, bucket: str) -> None:
        """Send `send` to every other rank and fill `receives[r]` from every other rank r; sizes and errors as above."""
        self._exchange("all_gather", [send] * self.size, receives, bucket)

    def _exchange(
        self, operation: str, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], bucket: str
    ) -> None:
        group = self.process_group
        start_ns = time.perf_counter_ns()
        bytes_sent = bytes_received = 0
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            target = (self.rank + distance) % self.size
            works: list[tuple[str, int, dist.Work]] = []
            # The receive goes first: gloo's sender waits for its peer's receive, and would cost one more round trip.
            failure = None
            try:
                if receives[source].numel():
                    works.append(("receiving from", source, group.recv([receives[source]], source, 0)))
                    bytes_received += receives[source].nbytes
                if sends[target].numel():
                    works.append(("sending to", target, group.send([sends[target]], target, 0)))
                    bytes_sent += sends[target].nbytes
                for direction, peer, work in works:
                    failure = f"{direction} rank {self.ranks[peer]}"
                    work.wait()
                failure = None
            except RuntimeError as error:
                failure = f"{failure or f'starting with ranks {self.ranks[source]}, {self.ranks[target]}'}: {error}"
            if failure is not None:
                # Outside of `except`: the error must not keep the group alive through its traceback, since closing the
                # connections is what tells the other ranks.
                del works, group
                self.close()
                raise CommunicationError(
                    f"torchbagua: {operation} of {bucket} over the {self.scope} group failed on rank "
                    f"{self.ranks[self.rank]} {failure}"
                )
        if self.observers:
            event = CommEvent(
                operation=operation,
                scope=self.scope,
                bucket=bucket,
                group_size=self.size,
                bytes_sent=bytes_sent,
                bytes_received=bytes_received,
                start_ns=start_ns,
                end_ns=time.perf_counter_ns(),
            )
            for observer in self.observers:
                observer.on_comm(event)


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group that torch's registry does not know: `new_group` wants the whole world to take part."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
