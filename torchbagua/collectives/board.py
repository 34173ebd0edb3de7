"""A board in the store of a group, on which ranks post texts for each other without blocking."""

from datetime import timedelta

import torch.distributed as dist

from torchbagua.transport.store_requests import StoreRequests


class StoreBoard:
    """See `torchbagua.observe.events.Board`. A slot uses one store key per rank, however often its text changes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = StoreRequests(dist.PrefixStore("board", store), timeout)
        self._rank = rank
        self._size = size

    def put(self, slot: int, text: str) -> None:
        """Replace this rank's text in `slot`."""
        self._store.set(f"{slot}/{self._rank}", text)

    def get(self, slot: int) -> list[str] | None:
        """Return all ranks' texts in `slot`, in rank order; None if a rank has not put a text there yet."""
        keys = [f"{slot}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # `get` would block
            return None
        return self._store.read_texts(keys)
