"""Agreement over a store: its requests and bytes, the ranks that errors name, and retries."""

import functools
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from torchbagua.collectives.agreement import Introduction, Settings, Verdict, agree_over_store
from torchbagua.transport.errors import CommunicationError

T = TypeVar("T")
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.5)


class CountingStore(dist.Store):
    """Wraps a store for one rank, and counts its requests and bytes."""

    def __init__(self, store: dist.Store, *, is_extended: bool = True) -> None:
        super().__init__()
        self._store = store
        self._is_extended = is_extended
        self.requests = self.num_bytes = 0

    def _ask(self, request: str, *arguments: Any) -> Any:
        self.requests += 1
        answer = getattr(self._store, request)(*arguments)
        passed = [*arguments, answer]
        texts = [text for each in passed for text in (each if isinstance(each, list) else [each])]
        self.num_bytes += sum(len(text) for text in texts if isinstance(text, str | bytes))
        return answer

    set, get = functools.partialmethod(_ask, "set"), functools.partialmethod(_ask, "get")
    add, check = functools.partialmethod(_ask, "add"), functools.partialmethod(_ask, "check")
    multi_get = functools.partialmethod(_ask, "multi_get")
    compare_set = functools.partialmethod(_ask, "compare_set")

    def wait(self, keys: list[str], timeout: timedelta = LONG) -> None:
        self._ask("wait", keys, timeout)

    def has_extended_api(self) -> bool:
        return self._is_extended


def introduction(rank: int, **settings: Any) -> Introduction:
    return Introduction({"the algorithm": "ByteGrad", **settings}, f"host{rank // 8}", "a clock", False, f"id{rank}")


def on_all_ranks(ranks: Sequence[int], body: Callable[[int], T]) -> dict[int, T | Exception]:
    """Return what `body(rank)`, on a thread for each rank, returned or raised."""

    def run(rank: int) -> T | Exception:
        try:
            return body(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return dict(zip(ranks, threads.map(run, ranks, timeout=60), strict=True))


@pytest.mark.parametrize(("size", "is_extended"), [(1, True), (5, False), (64, True)])
def test_requests_of_a_rank_do_not_grow_with_the_number_of_ranks(size: int, is_extended: bool) -> None:
    """Except that rank 0 reads each introduction separately from a store without calls for several keys."""
    store = dist.HashStore()
    stores = [CountingStore(store, is_extended=is_extended) for _ in range(size)]
    given = [rank // 8 for rank in range(size)]  # one entry per rank

    def body(rank: int) -> Verdict:
        own = introduction(rank, nodes=given, ratio=(1, 1.0)[rank % 2])  # numbers that compare equal agree
        return agree_over_store(stores[rank], rank, size, own, LONG)

    for verdict in on_all_ranks(range(size), body).values():
        assert verdict == Verdict("id0", given, [], False)
    assert [store.requests for store in stores] == [3 + (1 if is_extended else size), *[3] * (size - 1)]
    assert sum(store.num_bytes for store in stores) < 1500 * size


@pytest.mark.parametrize(("hosts", "kind"), [("abab", "file"), ("aabbbbcaa", "hash")])
def test_nodes_are_numbered_and_clocks_compared(hosts: str, kind: str, tmp_path: Path) -> None:
    size = len(hosts)
    # A FileStore has no extended calls, and each rank opens it.
    shared = dist.HashStore()
    stores = [shared if kind == "hash" else dist.FileStore(str(tmp_path / "store"), size) for _ in range(size)]

    def body(rank: int) -> Verdict:
        clock = None if rank == 2 else "its own" if rank == 3 else "that of most"
        own = introduction(rank)._replace(host=hosts[rank], clock=clock, compares_clocks=rank == size - 1)
        return agree_over_store(stores[rank], rank, size, own, LONG)

    expected = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    for verdict in on_all_ranks(range(size), body).values():
        assert verdict == Verdict("id0", expected, [2, 3], True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {5: {"block": "1024"}, 9: {"block": "512"}},
            "block: ranks 0-4, 6-8 and 10-16 have '2048', rank 5 has '1024', rank 9 has '512'; it must",
        ),
        ({0: {"block": "1"}}, "block: rank 0 has '1', ranks 1-16 have '2048'; it must"),
        (
            {7: {"nodes": [0, 0, 1]}, 3: {"block": "1"}},
            "nodes: ranks 0-6 and 8-16 have [0, 0, 0], rank 7 has [0, 0, 1]; it must",
        ),
        ({16: {"more": True}}, "more: ranks 0-15 have None, rank 16 has True; it must"),
    ],
)
def test_all_ranks_raise_the_same_error_for_a_disagreement(settings: dict[int, Settings], message: str) -> None:
    """It has the values of all ranks of the first setting that differs."""
    store, size = dist.HashStore(), 17

    def body(rank: int) -> Verdict:
        own = introduction(rank, nodes=[0, 0, 0], block="2048")
        own = own._replace(settings={**own.settings, **settings.get(rank, {})})
        return agree_over_store(store, rank, size, own, LONG)

    texts = {str(error) for error in on_all_ranks(range(size), body).values() if isinstance(error, ValueError)}
    assert len(texts) == 1
    assert f"torchbagua: ranks disagree on {message} be the same on every rank" in texts.pop()


@pytest.mark.parametrize("missing", [[0, 5], [7, 8, 16], list(range(1, 17))], ids=str)
def test_all_other_ranks_name_the_missing_ranks(missing: list[int]) -> None:
    """Rank 0, which reads the introductions, and others."""
    store, size = dist.HashStore(), 17
    present = [rank for rank in range(size) if rank not in missing]

    def body(rank: int) -> float:
        start = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            agree_over_store(store, rank, size, introduction(rank), SHORT)
        assert f"torchbagua: timed out after 0.5 s waiting for ranks {missing} of 17: every rank" in str(caught.value)
        return time.monotonic() - start

    for seconds in on_all_ranks(present, body).values():
        assert isinstance(seconds, float), seconds
        assert seconds < 3  # on a busy machine


def test_ranks_that_timed_out_may_retry() -> None:
    """Their first introductions no longer count: only the new ones are compared."""
    store, size = dist.HashStore(), 6

    def time_out(rank: int) -> str:
        with pytest.raises(TimeoutError) as caught:
            agree_over_store(store, rank, size, introduction(rank), SHORT)
        return str(caught.value)

    for text in on_all_ranks([0, 1, 4, 5], time_out).values():
        assert "ranks [2, 3] of 6" in str(text)
    # The late ranks now time out waiting for the others. One of them may have withdrawn before the other.
    for text in on_all_ranks([2, 3], time_out).values():
        assert re.search(r"ranks \[0, 1, (2, |3, )?4, 5\] of 6", str(text)), text

    def retry(rank: int) -> Verdict:
        time.sleep(0.05 * (rank == 5))
        return agree_over_store(store, rank, size, introduction(rank, changed=True), LONG)

    for verdict in on_all_ranks(range(size), retry).values():
        assert verdict == Verdict("id0", [0] * 6, [], False)


def test_the_introduction_of_a_retry_is_compared() -> None:
    """Rank 0 has seen its first introduction, and is still waiting."""
    store, size = dist.HashStore(), 17

    def body(rank: int) -> Verdict:
        if rank == 5:
            with pytest.raises(TimeoutError):
                agree_over_store(store, rank, size, introduction(rank), SHORT)
            return agree_over_store(store, rank, size, introduction(rank, changed=True), LONG)
        if rank == 16:
            time.sleep(1)
        return agree_over_store(store, rank, size, introduction(rank), LONG)

    for error in on_all_ranks(range(size), body).values():
        assert isinstance(error, ValueError)
        assert "disagree on changed: ranks 0-4 and 6-16 have None, rank 5 has True" in str(error)


@pytest.mark.parametrize("leaving", [0, 4])
def test_a_rank_that_is_interrupted_is_named_at_once(leaving: int) -> None:
    """The ranks that wait for it raise, and so do the ranks that come later."""
    store, size = dist.HashStore(), 7

    class Interrupted(CountingStore):
        def wait(self, keys: list[str], timeout: timedelta = LONG) -> None:
            raise KeyboardInterrupt

    def body(rank: int) -> float:
        if rank == leaving:
            with pytest.raises(KeyboardInterrupt):
                agree_over_store(Interrupted(store), leaving, size, introduction(leaving), LONG)
            return 0.0
        time.sleep(0.5 * (rank == 5))
        start = time.monotonic()
        expected = f"comparing settings failed: rank {leaving} of 7 has left: KeyboardInterrupt was raised"
        with pytest.raises(CommunicationError, match=expected):
            agree_over_store(store, rank, size, introduction(rank), LONG)
        return time.monotonic() - start

    for seconds in on_all_ranks(range(size), body).values():
        assert isinstance(seconds, float), seconds
        assert seconds < 10
