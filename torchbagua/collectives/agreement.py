"""Agreement between ranks: over the store of their group before they are connected, and over the open group afterwards.

Over the store, ranks compare settings, nodes and clocks in a tree. Every rank writes its introduction. A rank with
children reads what its children have written, and writes one summary of its subtree. Rank 0 writes the verdict, for
which all ranks wait. So a rank makes O(log n) requests, and all summaries together have O(n log n) bytes: a value that
is equal on consecutive ranks is written once. A rank whose wait ends with an exception, as of a signal handler, writes
the verdict that it has left.
"""

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.nodes import number_by_first_appearance
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.store_requests import StoreRequests

Settings = Mapping[str, bool | int | float | str | list[int] | None]

Runs = list[list[Any]]
"""Values in rank order, run-length encoded: [value, number of consecutive ranks] each."""

_FAN_OUT = 4

_POLL_S = 0.01

_LAST_POLL_S = 0.5

# Replaces the introduction of a rank that timed out, and may retry.
_WITHDRAWN = ""

_MOST_PIECES = 1024

_WORD_BYTES = 7  # of text, in a number


class Introduction(NamedTuple):
    """The values that a rank sends to the others.

    Attributes:
        settings: values that must be the same on all ranks, by their names in errors.
        host: the name of the rank's host.
        clock: the name of the rank's clock; None if unknown.
        compares_clocks: whether an observer of this rank needs the offsets between clocks.
        id: a name for the group, if this is rank 0.
        refusal: an UncompressedParametersWarning that a filter turns into an error on this rank; None if it takes part.
    """

    settings: Settings
    host: str
    clock: str | None
    compares_clocks: bool
    id: str
    refusal: str | None = None


class Verdict(NamedTuple):
    """The result of the agreement, the same on all ranks.

    Attributes:
        id: the group's name.
        nodes: the number of each rank's host, in the order of first appearance.
        other_clocks: the ranks whose clock is not known to be rank 0's.
        compares_clocks: whether an observer of any rank needs the offsets between clocks.
    """

    id: str
    nodes: list[int]
    other_clocks: list[int]
    compares_clocks: bool


def agree_over_store(store: dist.Store, rank: int, size: int, own: Introduction, timeout: timedelta) -> Verdict:
    """Compare settings with all other ranks. Collective; `store` contains no keys of another group.

    Raises:
        TimeoutError: a rank did not arrive within `timeout`; names the missing ranks. All ranks may retry with the same
            `store`.
        ValueError: ranks disagree; names the first setting that differs, the first rank that differs from rank 0, and
            both values. The same on every rank.
        UncompressedParametersWarning: a rank has a `refusal`. The same on every rank.
        CommunicationError: an exception, of a signal handler for instance, has ended the wait of a rank.
        SilentStoreError: the store did not answer within `timeout`.
    """
    return _Agreement(store, rank, size, timeout).reach(own)


class _Agreement:
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = StoreRequests(store, timeout)
        self._rank = rank
        self._size = size
        self._timeout_s = timeout.total_seconds()
        self._deadline_s = _concurrency.monotonic() + self._timeout_s
        self._has_withdrawn = False

    def reach(self, own: Introduction) -> Verdict:
        try:
            verdict = self._await_verdict(own)
        except BaseException as error:
            if not self._has_withdrawn:
                left = {"left": f"rank {self._rank} of {self._size} has left: {type(error).__name__}"}
                self._store.leave("verdict", _encode(left))
                self._store.leave(self._summary_key(self._rank), _encode(own._asdict()))  # its parent waits for this
            raise
        if "left" in verdict:
            raise CommunicationError(
                f"torchbagua: comparing settings failed: {verdict['left']} was raised while it waited for the other "
                "ranks; call attach or reify again on all ranks"
            )
        if "refusal" in verdict:
            raise UncompressedParametersWarning(verdict["refusal"])
        if "error" in verdict:
            raise ValueError(verdict["error"])
        clocks = _expand(verdict["other clocks"])
        return Verdict(
            id=verdict["id"],
            nodes=list(_expand(verdict["nodes"])),
            other_clocks=[rank for rank, is_other in enumerate(clocks) if is_other],
            compares_clocks=verdict["compares clocks"],
        )

    def _await_verdict(self, own: Introduction) -> dict[str, Any]:
        self._store.set(f"own/{self._rank}", _encode(own._asdict()))
        summary = _summary_of(own)
        children = list(_children(self._rank, self._size))
        if children:
            summary = _merge([summary, *self._read_or_withdraw([self._summary_key(child) for child in children])])
        if self._rank == 0:
            return _decode(self._store.set_first("verdict", _encode(self._decide(own, summary))))
        if children:  # else its introduction serves as its summary
            self._store.set(self._summary_key(self._rank), _encode(summary))
        (verdict,) = self._read_or_withdraw(["verdict"])
        return verdict

    def _decide(self, own: Introduction, summary: dict[str, Any]) -> dict[str, Any]:
        if self._store.add("withdrawals", 0):
            # The new introduction of a rank that retried may be missing from all summaries.
            introductions = self._read_or_withdraw([f"own/{rank}" for rank in range(self._size)])
            summary = _merge([_summary_of(Introduction(**introduction)) for introduction in introductions])
        first_ranks: dict[str, int] = {}  # the first rank with each digest of settings
        rank = 0
        for digest, count in summary["settings"]:
            first_ranks.setdefault(digest, rank)
            rank += count
        if len(first_ranks) > 1 or own.refusal is not None:
            ranks = list(first_ranks.values())
            introductions = self._read_or_withdraw([f"own/{rank}" for rank in ranks])
            for introduction in introductions:
                if introduction["refusal"] is not None:
                    return {"refusal": introduction["refusal"]}
            error = _disagreement(
                dict(zip(ranks, (introduction["settings"] for introduction in introductions), strict=True))
            )
            if error is not None:
                return {"error": error}
        is_known = own.clock is not None
        return {
            "id": own.id,
            "nodes": _runs(number_by_first_appearance(list(_expand(summary["hosts"])))),
            "other clocks": _runs(
                rank > 0 and not (is_known and clock == own.clock)
                for rank, clock in enumerate(_expand(summary["clocks"]))
            ),
            "compares clocks": summary["compares clocks"],
        }

    def _summary_key(self, rank: int) -> str:
        has_children = next(_children(rank, self._size), None) is not None
        return f"subtree/{rank}" if has_children else f"own/{rank}"

    def _read_or_withdraw(self, keys: list[str]) -> list[dict[str, Any]]:
        """Return the values of these keys when all keys exist; raise TimeoutError if that takes too long."""
        while True:
            try:
                left_s = max(self._deadline_s - _concurrency.monotonic(), _POLL_S)
                self._store.wait(keys, timedelta(seconds=left_s))
                has_come = True
            except RuntimeError:
                # Not all keys existed in time: a DistStoreError, or from a FileStore a plain RuntimeError. `check`
                # raises any other error.
                has_come = self._store.check(keys)
            if has_come and all(texts := self._store.read_texts(keys)):
                return [_decode(text) for text in texts]
            late_s = _concurrency.monotonic() - self._deadline_s
            # If all ranks have arrived, the last one only just now, the others are still computing the verdict.
            if late_s > 0 and ((missing := self._missing()) or late_s > self._timeout_s):
                self._withdraw(missing)
            _concurrency.sleep(_POLL_S if late_s < 0 else _LAST_POLL_S)

    def _withdraw(self, missing: list[int]) -> NoReturn:
        self._store.add("withdrawals", 1)
        self._store.set(f"own/{self._rank}", _WITHDRAWN)
        self._has_withdrawn = True
        if not missing:
            raise TimeoutError(
                f"torchbagua: timed out after {self._timeout_s:g} s waiting for ranks {self._stopped()} of "
                f"{self._size} to finish comparing settings: they have died or are blocked"
            )
        raise TimeoutError(
            f"torchbagua: timed out after {self._timeout_s:g} s waiting for ranks {missing} of {self._size}: every "
            "rank of the group must call reify or attach, or construct its groups, in the same order. If they only "
            "come later, pass a longer attach(..., timeout=timedelta(...))"
        )

    def _missing(self) -> list[int]:
        """Return the ranks that never arrived; if there are none, the ranks that timed out and have not retried."""
        missing, to_visit = [], [0]
        while to_visit:
            rank = to_visit.pop()
            key = self._summary_key(rank)
            if rank > 0 and key.startswith("subtree") and self._store.check([key]):
                continue  # its whole subtree has arrived
            if not self._store.check([f"own/{rank}"]):
                missing.append(rank)
            to_visit.extend(_children(rank, self._size))
        if missing:
            return sorted(missing)
        texts = self._store.read_texts([f"own/{rank}" for rank in range(self._size)])
        return [rank for rank, text in enumerate(texts) if text == _WITHDRAWN]

    def _stopped(self) -> list[int]:
        """Return the ranks that could have written their summary, or the verdict, and have not."""
        inner = [rank for rank in range(self._size) if self._summary_key(rank).startswith("subtree")] or [0]
        written = {rank for rank in inner if self._store.check(["verdict" if rank == 0 else self._summary_key(rank)])}
        waiting = {rank for rank in inner if {*_children(rank, self._size)} & {*inner} - written}
        return sorted({*inner} - written - waiting)


def _children(rank: int, size: int) -> Iterator[int]:
    """Return the children of a rank in the tree; their subtrees are consecutive ranges of ranks."""
    stride = 1
    while stride < size and rank % (_FAN_OUT * stride) == 0:
        yield from range(rank + stride, min(rank + _FAN_OUT * stride, size), stride)
        stride *= _FAN_OUT


def _summary_of(own: Introduction) -> dict[str, Any]:
    text = json.dumps([own.settings, own.refusal], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return {
        "settings": [[digest, 1]],
        "hosts": [[own.host, 1]],
        "clocks": [[own.clock, 1]],
        "compares clocks": own.compares_clocks,
    }


def _merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of consecutive ranges of ranks. An introduction may represent a single rank."""
    summaries = [part if "clocks" in part else _summary_of(Introduction(**part)) for part in parts]
    merged: dict[str, Any] = {
        name: _join_runs(summary[name] for summary in summaries) for name in ("settings", "hosts", "clocks")
    }
    return {**merged, "compares clocks": any(summary["compares clocks"] for summary in summaries)}


def _disagreement(settings_by_rank: Mapping[int, Settings]) -> str | None:
    """Return the error for ranks that disagree, given the first rank with each distinct set of settings."""
    names = dict.fromkeys(name for settings in settings_by_rank.values() for name in settings)
    for name in names:
        expected = settings_by_rank[0].get(name)
        for rank, settings in settings_by_rank.items():
            if settings.get(name) != expected:
                return (
                    f"torchbagua: ranks disagree on {name}: rank 0 has {expected!r}, rank {rank} has "
                    f"{settings.get(name)!r}; it must be the same on every rank"
                )
    return None


def _runs(values: Iterable[Any]) -> Runs:
    return _join_runs([[value, 1]] for value in values)


def _join_runs(parts: Iterable[Runs]) -> Runs:
    joined: Runs = []
    for part in parts:
        for value, count in part:
            if joined and joined[-1][0] == value:
                joined[-1][1] += count
            else:
                joined.append([value, count])
    return joined


def _expand(runs: Runs) -> Iterator[Any]:
    return (value for value, count in runs for _ in range(count))


def _encode(values: Mapping[str, Any]) -> str:
    """Return JSON. A list in the settings may have an entry for each rank, and is run-length encoded."""
    settings = values.get("settings")
    if isinstance(settings, Mapping):
        values = {**values, "settings": {name: _shorten(value) for name, value in settings.items()}}
    return json.dumps(values)


def _decode(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    if isinstance(settings := values.get("settings"), dict):
        values["settings"] = {
            name: list(_expand(value["runs"])) if isinstance(value, dict) else value for name, value in settings.items()
        }
    return values


def _shorten(value: Any) -> Any:
    return {"runs": _runs(value)} if isinstance(value, list) else value


def all_reduce_max(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
    """Return the maximum of each value over the ranks, the same on all ranks, in log2(n) exchanges.

    Args:
        communicator: the ranks that agree.
        values: the values of this rank; every rank passes the same number of values.
        purpose: the purpose of the agreement, in events and errors.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    largest = torch.tensor(values, dtype=torch.int64)
    distance = 1
    while distance < communicator.size:
        source = communicator.rank_before(distance)
        theirs = torch.empty_like(largest)
        turns = [(communicator.rank_after(distance), source)]
        pipeline = Pipeline(communicator, theirs.device)
        # If ranks are in different agreements, a message of another length has another tag, and this rank times out.
        # A transport may end the process if it receives a message that is too long. MPI guarantees 15 bits for tags.
        piece = len(values) % _MOST_PIECES
        Exchange(pipeline, "agreement", {source: theirs}, purpose, turns, piece=piece).run([largest])
        torch.maximum(largest, theirs, out=largest)
        distance *= 2
    return largest.tolist()


def fingerprint(value: object) -> int:
    """Return a number that identifies `value` by its repr, for `require_same_progress` to compare."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def fingerprint_of_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that identifies the values of these tensors, for `require_same_progress` to compare."""
    found = hashlib.sha256()
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        found.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))  # numpy may be missing
    return int.from_bytes(found.digest()[:5], "big")


class _RankedNumber(NamedTuple):
    """A number and the rank that has it. The maximum of several packed pairs is the pair with the largest number."""

    number: int
    rank: int

    def pack(self, size: int) -> int:
        """Return both as one number, which sorts in the order of the pairs."""
        return self.number * size + self.rank

    @classmethod
    def unpack(cls, packed: int, size: int) -> "_RankedNumber":
        """Return the pair that `pack` has packed."""
        return cls(*divmod(packed, size))


class Difference(NamedTuple):
    """Two ranks with different numbers, the lower rank first.

    Attributes:
        name: the name of the number.
        ranks: the two ranks.
        numbers: the number of each rank.
    """

    name: str
    ranks: tuple[int, int]
    numbers: tuple[int, int]


def find_difference(
    communicator: Communicator, numbers: Mapping[str, int], purpose: str, value: int = 0
) -> tuple[int, Difference | None]:
    """Return the largest `value` of all ranks, and the first of `numbers` in which two ranks differ. Collective.

    Both results are the same on all ranks.

    Args:
        communicator: the ranks that compare their numbers.
        numbers: numbers below 2^40, by name; every rank passes the same number of them.
        purpose: the operation that follows, in errors.
        value: any number.

    Raises:
        CommunicationError: a peer disconnected.
    """
    size, rank = communicator.size, communicator.rank
    highest = [_RankedNumber(number, rank).pack(size) for number in numbers.values()]
    # The maximum of the negated numbers is the minimum of the numbers.
    lowest = [_RankedNumber(-number, rank).pack(size) for number in numbers.values()]
    largest_value, *found = all_reduce_max(communicator, [value, *highest, *lowest], purpose)
    holders = [_RankedNumber.unpack(packed, size) for packed in found]
    for name, high, low in zip(numbers, holders[: len(numbers)], holders[len(numbers) :], strict=True):
        if high.number != -low.number:
            ends = {communicator.ranks[high.rank]: high.number, communicator.ranks[low.rank]: -low.number}
            (first, first_number), (second, second_number) = sorted(ends.items())
            return largest_value, Difference(name, (first, second), (first_number, second_number))
    return largest_value, None


def require_same_progress(
    communicator: Communicator,
    progress: Mapping[str, int],
    purpose: str,
    value: int = 0,
    check_value: Callable[[int], object] = lambda value: None,
) -> int:
    """Return the largest `value` of all ranks; raise the same error on all ranks if their progress differs.

    A transport may end the process if the two sides of a message differ in length. Ranks whose progress may differ
    therefore compare it before they send such a message.

    Args:
        communicator: the ranks that compare their progress.
        progress: numbers below 2^40, by their names in the error; every rank passes the same number of them.
        purpose: the operation that follows, in errors.
        value: any number.
        check_value: called with the largest value before the ranks compare their progress. It may raise.

    Raises:
        CommunicationError: the progress of two ranks differs; names both ranks, the quantity and both numbers. Or a
            peer disconnected.
    """
    largest_value, difference = find_difference(communicator, progress, purpose, value)
    check_value(largest_value)
    if difference is not None:
        name, (first, second), (first_number, second_number) = difference
        calls = _name_calls(communicator, difference.ranks, purpose)
        raise CommunicationError(
            f"torchbagua: ranks are out of step in {purpose}: rank {first} has {first_number} {name}, rank "
            f"{second} has {second_number}.{calls} Every rank must run the same backward passes, optimizer steps, "
            "averaged_weights, state loads, layer unfreezes, aborts and resumes, in the same order. Check whether a "
            "rank ran out of data, left early or skipped a step of an optimizer; if a GradScaler can skip a step on "
            "one rank, pass it to attach(..., grad_scaler=scaler)."
        )
    return largest_value


def _name_calls(communicator: Communicator, ranks: tuple[int, int], purpose: str) -> str:
    """Return a sentence that names the purposes of two ranks, if they differ. Collective, after a difference."""
    own_rank = communicator.ranks[communicator.rank]
    own = purpose.encode()[: 8 * _WORD_BYTES].ljust(8 * _WORD_BYTES)
    words = [int.from_bytes(own[start : start + _WORD_BYTES], "big") for start in range(0, len(own), _WORD_BYTES)]
    values = [word if own_rank == rank else 0 for rank in ranks for word in words]
    try:
        largest = all_reduce_max(communicator, values, purpose)
    except CommunicationError:  # the difference is the better error
        return ""
    text = b"".join(word.to_bytes(_WORD_BYTES, "big") for word in largest)
    first, second = (part.decode(errors="ignore").strip() for part in (text[: len(own)], text[len(own) :]))
    return "" if first == second else f" Rank {ranks[0]} is in {first}, rank {ranks[1]} in {second}."
