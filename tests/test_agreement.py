"""Agreement of ranks over an open group, and over a store before there is one: maxima, records, errors, and retries."""

import functools
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.agreement import (
    Introduction,
    Progress,
    Settings,
    Verdict,
    agree,
    agree_over_store,
    all_reduce_max,
    first_difference,
    require_same_progress,
)
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError


@dataclass(frozen=True)
class Fact:
    number: int
    text: str = ""
    flag: bool = False


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_maximum_over_any_number_of_ranks(size: int) -> None:
    values = [[random.Random(f"{rank}/{index}").randint(-(2**50), 2**50) for index in range(5)] for rank in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, observers=[recorder := tb.observe.Recorder()])
        found = all_reduce_max(own.world, values[group.rank()], "a test")
        assert found == [max(column) for column in zip(*values, strict=True)]
        assert sum(event.phase == "send" for event in recorder.events) == (size - 1).bit_length()

    run_ranks(size, body)


@pytest.mark.parametrize(("size", "kind"), [(1, "equal"), (2, "one"), (3, "all"), (4, "equal"), (5, "one"), (8, "all")])
def test_every_rank_has_the_records_of_all(size: int, kind: str) -> None:
    """Records that are equal are not sent, but only two digests and a length. Others differ in length."""
    records = {
        "equal": [Fact(7, "x", True)] * size,
        "one": [Fact(7, flag=rank == size - 1) for rank in range(size)],
        "all": [Fact(10**rank, rank * "é") for rank in range(size)],
    }[kind]

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, observers=[recorder := tb.observe.Recorder()])
        assert agree(own.world, records[group.rank()], "a test") == records
        sent_bytes = [event.wire_bytes for event in recorder.events if event.phase == "send"]
        num_turns = (size - 1).bit_length()
        assert sent_bytes[:num_turns] == [24] * num_turns
        assert len(sent_bytes) == (num_turns if kind == "equal" else 2 * num_turns)

    run_ranks(size, body)


def test_ranks_in_different_agreements_all_raise() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = "a vote" if group.rank() == 1 else "a round"
        record: Any = Fact(1) if group.rank() == 1 else Progress("a round", {})
        expected = f"out of step in {own}. Ranks 0 and 2-3 are in a round, rank 1 in a vote. Every"
        with pytest.raises(tb.CommunicationError, match=expected):
            agree(tb.BaguaProcessGroup(group).world, record, own)

    run_ranks(4, body)


def compare(communicator: Communicator, numbers: dict[str, int], call: str) -> None:
    require_same_progress(communicator, agree(communicator, Progress(call, numbers), call))


def test_ranks_out_of_step_raise_the_same_error() -> None:
    """It has the number of every rank."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        compare(own.world, {"steps": 2**62, "rounds": 0}, "a good round")
        expected = "out of step in a bad round: ranks disagree on steps: ranks 0-1 and 3-4 have 5, rank 2 has 6. Every"
        with pytest.raises(tb.CommunicationError, match=expected):
            compare(own.world, {"rounds": 7, "steps": 6 if group.rank() == 2 else 5}, "a bad round")

    run_ranks(5, body)


def test_ranks_in_different_calls() -> None:
    """All ranks name all calls, also if the numbers are equal; on a node, ranks have their numbers in the group."""

    def body(group: dist.ProcessGroup) -> None:
        own, is_first = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1]), group.rank() % 2 == 0
        call = "the mean of é" if is_first else "a round"
        first, second = (0, 1) if group.rank() < 2 else (2, 3)
        calls = f"Rank {first} is in the mean of é, rank {second} in a round. Every"
        for communicator, steps, expected in (
            (
                own.world,
                5,
                f"out of step in {call}. Ranks 0 and 2 are in the mean of é, ranks 1 and 3 in a round. Every",
            ),
            (own.intra_node, 5 - is_first, f"disagree on steps: rank {first} has 4, rank {second} has 5. {calls}"),
        ):
            with pytest.raises(tb.CommunicationError, match=expected):
                compare(communicator, {"steps": steps}, call)

    run_ranks(4, body)


def test_the_first_difference_has_the_values_of_all_ranks() -> None:
    records: list[dict[str, object]] = [{"size": 1, "kind": [0, 1]}, {"size": 1.0}, {"size": 1, "kind": [0, 1]}]
    assert first_difference(records, [4, 5, 6]) == "ranks disagree on kind: ranks 4 and 6 have [0, 1], rank 5 has None"
    assert first_difference(records[::2], [4, 6]) is None
    # It lists a limited number of values.
    difference = str(first_difference([{"seed": rank} for rank in range(1000)], range(1000)))
    assert difference.endswith("rank 15 has 15, and 984 others differ too")


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
