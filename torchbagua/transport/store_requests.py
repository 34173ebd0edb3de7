"""The store of a group. Several texts take one request, if the store has multi-key calls; FileStore does not."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._torch import store_of
from torchbagua.transport.errors import cause_of

T = TypeVar("T")

REQUEST_THREAD = "torchbagua: a request to the store"
"""The name of the thread of a request."""

# How much longer than the store itself a rank waits for the answer to a request that has its own timeout.
_ANSWER_S = 2.0
_READ_S = 0.2


def require_store(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the ranks of a group share; raise ValueError if the group has none."""
    store = store_of(process_group)
    if store is None:
        raise ValueError(
            "BaguaProcessGroup: process_group must have a store, got a group without one, as mpi creates; call "
            'init_process_group("gloo"), and pass the group that new_group(backend="mpi") returns'
        )
    return store


class SilentStoreError(RuntimeError):
    """The store did not answer in time."""


class StoreRequests:
    """Makes requests to a store, each on a separate thread, and raises SilentStoreError if the answer takes too long.

    Torch does not bound them: if the store's process is stopped, even the `wait` of a TCPStore with a timeout never
    returns (torch 2.13). The thread of such a request remains, and until it ends all further requests fail at once.

    The calling thread waits in Python, so signal handlers run. If one of them raises, the next request opens another
    connection, since the pending one occupies the first.
    """

    # Requests that are pending, each with a lock that it releases at its end.
    _silent: "_concurrency.Lock | None" = None
    _silent_s = 0.0  # how long it was waited for
    _interrupted: "_concurrency.Lock | None" = None

    def __init__(self, store: dist.Store, timeout: timedelta) -> None:
        self._store = store
        self._timeout_s = timeout.total_seconds()

    def ask(self, request: Callable[[dist.Store], T], longest_s: float | None = None) -> T:
        """Return `request(store)`, which may take `longest_s`, by default the timeout; it then raises."""
        if self._silent is not None and self._silent.locked():
            raise self._silence(self._silent_s)
        is_occupied = self._interrupted is not None and self._interrupted.locked()
        self._interrupted = None
        store, answers, errors = self._store, list[T](), list[BaseException]()
        pending = _concurrency.Lock()
        pending.acquire()

        def run() -> None:
            try:
                own = store
                if is_occupied:
                    own = self._store = store.clone()  # type: ignore[attr-defined]
                answers.append(request(own))
            except BaseException as error:
                errors.append(error)
            pending.release()

        longest_s = self._timeout_s if longest_s is None else longest_s
        _concurrency.Thread(target=run, name=REQUEST_THREAD, daemon=True).start()
        try:  # `join` would count a thread as ended once a signal handler has raised in it (Python 3.11)
            # If this process was stopped meanwhile, the answer has come, and the other thread has yet to read it.
            has_ended = pending.acquire(timeout=longest_s) or pending.acquire(timeout=_READ_S)
        except BaseException:
            self._interrupted = pending
            raise
        if not has_ended:
            self._silent, self._silent_s = pending, longest_s
            raise self._silence(longest_s)
        if errors:
            raise errors.pop()  # the traceback must not refer to itself
        return answers.pop()

    def clone(self, key: str) -> "StoreRequests":
        """Return requests under keys with a prefix, over another connection: a waiting thread occupies this one."""
        store = self.ask(lambda store: dist.PrefixStore(key, store.clone()))  # type: ignore[attr-defined]
        return StoreRequests(store, timedelta(seconds=self._timeout_s))

    def open_group(self, create: Callable[[dist.Store], T]) -> T:
        """Return a group that connects its ranks through the store: twice the timeout bounds it, as it bounds gloo."""
        return self.ask(create, 2 * self._timeout_s + _ANSWER_S)

    def cause_of_failed_open(self, error: BaseException, size: int) -> str:
        """Return the cause of an `error` of `open_group`, with the ranks that have not announced that they open it."""
        missing = self.missing_ranks("opens", size)
        return f"ranks {missing} did not open the group: {cause_of(error)}" if missing else cause_of(error)

    def set(self, key: str, text: str) -> None:
        self.ask(lambda store: store.set(key, text))

    def get(self, key: str) -> str:
        return self.ask(lambda store: store.get(key)).decode()

    def add(self, key: str, amount: int) -> int:
        return self.ask(lambda store: store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return self.ask(lambda store: store.check(keys))

    def set_first(self, key: str, text: str) -> str:
        """Write `text` under `key`, unless another text is there already. Return the text that is there."""
        return self.ask(lambda store: store.compare_set(key, "", text)).decode()

    def leave(self, key: str, text: str) -> None:
        """Write `text` under `key`, where other ranks wait for another text, unless the store fails or is silent."""
        with suppress(RuntimeError):
            self.ask(lambda store: store.compare_set(key, "", text), _ANSWER_S)

    def peek(self, key: str) -> str | None:
        """Return the text under `key`; None if there is none, or if the store fails or is silent."""
        with suppress(RuntimeError):
            return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None, _ANSWER_S)
        return None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are set; RuntimeError after the timeout, a DistStoreError except from a FileStore."""
        self.ask(lambda store: store.wait(keys, timeout), timeout.total_seconds() + _ANSWER_S)

    def announce(self, what: str, rank: int) -> None:
        """Announce to `missing_ranks` that `rank` has reached a point that `what` names."""
        self.set(f"{what}/{rank}", "")

    def missing_ranks(self, what: str, size: int) -> list[int]:
        """Return the ranks that have not announced `what`; none if the store no longer responds."""
        with suppress(RuntimeError):
            return self.missing([f"{what}/{rank}" for rank in range(size)])
        return []

    def missing(self, keys: list[str], start: int = 0) -> list[int]:
        """Return the positions of the keys that are not set, from `start` on; a set half takes one request."""
        if self.check(keys):
            return []
        if len(keys) == 1:
            return [start]
        half = len(keys) // 2
        return self.missing(keys[:half], start) + self.missing(keys[half:], start + half)

    def read_texts(self, keys: list[str]) -> list[str]:
        """Return the text under each of `keys`; wait for the keys that are not set yet."""

        def read(store: dist.Store) -> list[bytes]:
            if len(keys) > 1 and store.has_extended_api():  # type: ignore[attr-defined]
                return store.multi_get(keys)
            return [store.get(key) for key in keys]

        return [text.decode() for text in self.ask(read)]

    def write_text(self, keys: list[str], text: str) -> None:
        """Write the same text under each of `keys`."""

        def write(store: dist.Store) -> None:
            if len(keys) > 1 and store.has_extended_api():  # type: ignore[attr-defined]
                store.multi_set(keys, [text] * len(keys))  # type: ignore[attr-defined]
                return
            for key in keys:
                store.set(key, text)

        self.ask(write)

    def _silence(self, longest_s: float) -> SilentStoreError:
        return SilentStoreError(
            f"the store of the process group did not answer within {longest_s:g} s: check the process that hosts it, "
            "usually rank 0 or the launcher, and restart all ranks"
        )
