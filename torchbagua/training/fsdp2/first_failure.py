"""What happens when one of the threads that communicate for a sharded module fails."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchbagua.collectives.process_group import BaguaProcessGroup


class FirstFailure:
    """Closes all groups of a module when communication over one of them fails, so that other ranks notice at once.

    What fails after that fails because the groups are closed, and raises the first error, which names the peer.

    Args:
        groups: over which is communicated, on several threads.
    """

    def __init__(self, groups: Sequence[BaguaProcessGroup]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Close the groups if the block raises, and raise the first error of all blocks."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                if self._error is None and isinstance(error, Exception):
                    self._error = error
                first = self._error
            for group in self._groups:
                group.close()
            if first is None or first is error:
                raise
            raise first from None
