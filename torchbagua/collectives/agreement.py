"""Agreement between ranks: over the store of their group before they are connected, and over the open group afterwards.

In both, every rank gives a record of named fields. If records differ that must be equal, every rank learns of it and
raises the same error, which has the values of all ranks (`first_difference`). docs/design.md lists all comparisons of
ranks, those too that are none of these.

Over the store, rank 0 reads the introductions of all ranks in one request, and writes the verdict, for which all ranks
wait. A rank whose wait ends with an exception, as of a signal handler, writes the verdict that it has left.

Over the group, ranks first compare a digest of their records, and send the records only if they differ (`agree`).
"""

import base64
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.transport.communicator import Communicator, RingMessage
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.store_requests import StoreRequests

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
# Part of the default repr of an object. The address is the same for all threads, but differs between processes.
_ADDRESS = " at 0x"


def stable_repr(value: object, owner: str) -> str:
    """Return the repr of `value`, with the qualified names of functions instead of their addresses."""
    text = repr(value)
    if _ADDRESS not in text or isinstance(value, str):
        return text
    if isinstance(value, _FUNCTIONS):
        return qualified_name(value, owner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        parts = [f"{name}={stable_repr(getattr(value, name), owner)}" for name in shown]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if type(value) is list:
        return f"[{', '.join(stable_repr(item, owner) for item in value)}]"
    if type(value) is tuple:
        return f"({', '.join(stable_repr(item, owner) for item in value)}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return (
            f"{{{', '.join(f'{stable_repr(key, owner)}: {stable_repr(item, owner)}' for key, item in value.items())}}}"
        )
    raise TypeError(f"{owner} must have a repr that is the same on all ranks, as a dataclass has, got {text}")


def qualified_name(function: object, owner: str) -> str:
    """Return the name by which `function` can be imported, with its module."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[str(module)])
    except (AttributeError, KeyError):
        found = None
    if found != function:
        raise TypeError(
            f"{owner} must be a function that can be imported by its name, not a lambda, partial or nested function, "
            f"got {function!r}; ranks compare it by this name, and traces show the name"
        )
    return f"{module}.{name}"


R = TypeVar("R")

Settings = Mapping[str, bool | int | float | str | list[int] | None]

_POLL_S = 0.01

_LAST_POLL_S = 0.5

# Replaces the introduction of a rank that timed out, and may retry.
_WITHDRAWN = ""

# In an error: more distinct values are not listed.
_MOST_VALUES = 16

# The channel of `all_reduce_max` is the number of values. If ranks take different maxima, a message of another length
# then has another tag, and this rank times out. A transport may end the process if it receives a message that is too
# long. MPI guarantees 15 bits for tags.
_MOST_NUMBERS = 1024

_DIGEST_CHANNEL, _RECORD_CHANNEL, PROGRESS_CHANNEL, WEIGHTS_CHANNEL = range(_MOST_NUMBERS, _MOST_NUMBERS + 4)


# Errors that name ranks and their values.


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 2-5 and 9", for ascending ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = [[*run] for _, run in itertools.groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    *names, last = [str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return f"ranks {', '.join(names)} and {last}" if names else f"ranks {last}"


def ranks_by_value(values: Sequence[Any], ranks: Sequence[int]) -> list[tuple[Any, list[int]]]:
    """Return each distinct value with its ranks, given the value of each of `ranks`."""
    found: list[tuple[Any, list[int]]] = []
    for value, rank in zip(values, ranks, strict=True):
        same = next((members for other, members in found if other == value), None)
        if same is None:
            found.append((value, [rank]))
        else:
            same.append(rank)
    return found


def first_difference(records: Sequence[Mapping[str, object]], ranks: Sequence[int]) -> str | None:
    """Return "ranks disagree on steps: rank 0 has 5, ranks 1-3 have 6"; None if all ranks have equal records."""
    if all(record == records[0] for record in records):
        return None
    for name in dict.fromkeys(itertools.chain.from_iterable(records)):
        found = ranks_by_value([record.get(name) for record in records], ranks)
        if len(found) > 1:
            seen = [f"{name_ranks(who)} {'has' if len(who) == 1 else 'have'} {value!r}" for value, who in found]
            if len(seen) > _MOST_VALUES:
                seen[_MOST_VALUES:] = [f"and {len(seen) - _MOST_VALUES} others differ too"]
            return f"ranks disagree on {name}: {', '.join(seen)}"
    return None


# Over the store.


class Introduction(NamedTuple):
    """The record of a rank.

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


# The verdict may be a text under one of these names instead.
_ERRORS = {"left": CommunicationError, "refusal": UncompressedParametersWarning, "difference": ValueError}


def agree_over_store(store: dist.Store, rank: int, size: int, own: Introduction, timeout: timedelta) -> Verdict:
    """Compare settings with all other ranks. Collective; `store` contains no keys of another group."""
    return _StoreAgreement(store, rank, size, timeout).reach(own)


class _StoreAgreement:
    _has_withdrawn = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = StoreRequests(store, timeout)
        self._rank = rank
        self._keys = [f"own/{rank}" for rank in range(size)]
        self._timeout_s = timeout.total_seconds()
        self._deadline_s = _concurrency.monotonic() + self._timeout_s

    def reach(self, own: Introduction) -> Verdict:
        key, text = self._keys[self._rank], _encode(own._asdict())
        try:
            self._store.set(key, text)
            if self._rank == 0:
                decision = _decide([Introduction(**values) for values in self._read_or_withdraw(self._keys)])
                verdict = _decode(self._store.set_first("verdict", _encode(decision)))
            else:
                (verdict,) = self._read_or_withdraw(["verdict"])
        except BaseException as error:
            if not self._has_withdrawn:
                left = (
                    f"torchbagua: comparing settings failed: rank {self._rank} of {len(self._keys)} has left: "
                    f"{type(error).__name__} was raised while it waited for the other ranks; call attach or reify "
                    "again on all ranks"
                )
                self._store.leave("verdict", _encode({"left": left}))
                self._store.leave(key, text)  # rank 0 waits for this
            raise
        for name, error_type in _ERRORS.items():
            if name in verdict:
                raise error_type(verdict[name])
        return Verdict(**verdict)

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
            # If all ranks have arrived, the last one only just now, rank 0 is still computing the verdict.
            if late_s > 0 and ((missing := self._missing()) or late_s > self._timeout_s):
                self._withdraw(missing)
            _concurrency.sleep(_POLL_S if late_s < 0 else _LAST_POLL_S)

    def _missing(self) -> list[int]:
        """Return the ranks that never arrived; if there are none, the ranks that timed out and have not retried."""
        if missing := self._store.missing(self._keys):
            return missing
        texts = self._store.read_texts(self._keys)
        return [rank for rank, text in enumerate(texts) if text == _WITHDRAWN]

    def _withdraw(self, missing: list[int]) -> NoReturn:
        self._store.set(self._keys[self._rank], _WITHDRAWN)
        self._has_withdrawn = True
        advice = (
            "every rank of the group must call reify or attach, or construct its groups, in the same order. If they "
            "only come later, pass a longer attach(..., timeout=timedelta(...))"
        )
        whom = f"ranks {missing or [0]} of {len(self._keys)}"
        raise TimeoutError(
            f"torchbagua: timed out after {self._timeout_s:g} s waiting for {whom}"
            f"{f': {advice}' if missing else ' to finish comparing settings: they have died or are blocked'}"
        )


def _decide(introductions: Sequence[Introduction]) -> dict[str, Any]:
    """Return the fields of the verdict, or an error."""
    first = introductions[0]
    for introduction in introductions:
        if introduction.refusal is not None:
            return {"refusal": introduction.refusal}
    difference = first_difference([each.settings for each in introductions], range(len(introductions)))
    if difference is not None:
        return {"difference": f"torchbagua: {difference}; it must be the same on every rank"}
    verdict = Verdict(
        id=first.id,
        nodes=number_by_first_appearance([each.host for each in introductions]),
        other_clocks=[
            rank
            for rank, each in enumerate(introductions)
            if rank and (each.clock is None or each.clock != first.clock)
        ],
        compares_clocks=any(each.compares_clocks for each in introductions),
    )
    return verdict._asdict()


def number_given_nodes(nodes: Sequence[str | int], num_ranks: int) -> list[int]:
    """Return the numbers of the nodes that a user has labeled, one for each rank."""
    is_list = isinstance(nodes, list | tuple)
    if not is_list or not all(isinstance(label, str | int) for label in nodes):
        raise TypeError(f"BaguaProcessGroup: nodes must be a list of strings or integers, got {nodes!r}")
    if len(nodes) != num_ranks:
        raise ValueError(
            f"BaguaProcessGroup: nodes must have one entry for each of {num_ranks} ranks, got {len(nodes)}"
        )
    return number_by_first_appearance(nodes)


def number_by_first_appearance(labels: Sequence[str | int]) -> list[int]:
    """Return the number of each label, in the order of first appearance."""
    numbers: dict[str | int, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]


def _encode(values: Mapping[str, Any]) -> str:
    """Return compressed JSON: some values are lists with an entry for each rank."""
    return base64.b85encode(zlib.compress(json.dumps(values).encode())).decode()


def _decode(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    return values


# Over the group.


def all_reduce_max(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
    """Return the maximum of each value over the ranks, the same on all ranks, in log2(n) exchanges.

    Unlike `agree`, it compares nothing: ranks may have different values, and no rank learns which rank has which.

    Args:
        communicator: the ranks that agree.
        values: the values of this rank; every rank passes the same number of values.
        purpose: the purpose of the agreement, in events and errors.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    return _largest(communicator, values, purpose, len(values) % _MOST_NUMBERS)


def _largest(
    communicator: Communicator, values: Sequence[int], purpose: str, channel: int, *, is_observed: bool = True
) -> list[int]:
    name = purpose if is_observed else None
    largest = torch.tensor(values, dtype=torch.int64)
    distance = 1
    while distance < communicator.size:
        received, failed = torch.empty_like(largest), f"agreement of {purpose}"
        theirs = RingMessage(communicator, largest, received, failed, channel, distance, name).receive()
        largest = torch.maximum(largest, theirs)
        distance *= 2
    return largest.tolist()


def agree(communicator: Communicator, record: R, purpose: str, *, is_observed: bool = True) -> list[R]:
    """Return the records of all ranks, in rank order. Collective; all ranks return the same.

    If all records are equal, this takes log2(n) messages of 24 bytes. Otherwise it takes as many again, and the last of
    these have up to n / 2 records. A rank in another agreement may have records of another kind: then all raise.

    Args:
        communicator: the ranks that agree.
        record: the record of this rank, a dataclass of values that JSON has; of the same class on all ranks.
        purpose: the purpose of the agreement, in events and errors.
        is_observed: whether observers are notified of the messages.

    Raises:
        CommunicationError: ranks are in different agreements. Or a peer disconnected or did not take part within the
            group's timeout.
    """
    text = json.dumps([type(record).__name__, purpose, vars(record)], default=int)  # a number of numpy, say
    digest = fingerprint(text)
    found = _largest(communicator, [digest, -digest, len(text)], purpose, _DIGEST_CHANNEL, is_observed=is_observed)
    highest, minus_lowest, longest = found
    if highest == -minus_lowest:
        return [record] * communicator.size
    texts = _gather(communicator, text.ljust(longest).encode(), purpose, is_observed=is_observed)
    kinds, purposes, fields = zip(*map(json.loads, texts), strict=True)
    if len(set(kinds)) > 1:
        raise _out_of_step(communicator, purposes, None)
    return [type(record)(**named) for named in fields]


def _gather(communicator: Communicator, own: bytes, purpose: str, *, is_observed: bool) -> list[bytes]:
    """Return the bytes of all ranks, of which all have the same number, by Bruck's algorithm (1997)."""
    name = purpose if is_observed else None
    size, num_bytes, failed = communicator.size, len(own), f"agreement of {purpose}"
    rows = torch.empty(size * num_bytes, dtype=torch.uint8)  # row k: of the rank k places before this one
    rows[:num_bytes] = torch.tensor(list(own), dtype=torch.uint8)
    known = 1
    while known < size:
        stop = min(2 * known, size) * num_bytes
        start = known * num_bytes
        sent, received = rows[: stop - start], rows[start:stop]
        RingMessage(communicator, sent, received, failed, _RECORD_CHANNEL, known, name).receive()
        known *= 2
    of_ranks = [rows[place * num_bytes :][:num_bytes] for place in (communicator.rank_before(r) for r in range(size))]
    return [bytes(row.tolist()) for row in of_ranks]


@dataclass(frozen=True)
class Progress:
    """The record of a rank that begins a call for which all ranks must be equally far.

    Attributes:
        call: the name of the call, in errors; the same on all ranks.
        numbers: numbers that must be the same on all ranks, by their names in errors.
        changed_parameter: see `LayoutWatch`.
        flag: anything else that the other ranks must know.
    """

    call: str
    numbers: Mapping[str, int]
    changed_parameter: int = 0
    flag: bool = False


def compare_progress(communicator: Communicator, own: Progress) -> None:
    """Have ranks compare their progress; see `require_same_progress`. Collective."""
    require_same_progress(communicator, agree(communicator, own, own.call))


def require_same_progress(communicator: Communicator, progress: Sequence[Progress]) -> None:
    """Raise CommunicationError, which names the values of all ranks, if their progress or their calls differ.

    A transport may end the process if the two sides of a message differ in length. Ranks whose progress may differ
    therefore compare it before they send such a message.
    """
    difference = first_difference([each.numbers for each in progress], communicator.ranks)
    calls = [each.call for each in progress]
    if difference is not None or len(set(calls)) > 1:
        raise _out_of_step(communicator, calls, difference)


def _out_of_step(communicator: Communicator, calls: Sequence[str], difference: str | None) -> CommunicationError:
    (call, first), *others = ranks_by_value(calls, communicator.ranks)
    named = [f"R{name_ranks(first)[1:]} {'is' if len(first) == 1 else 'are'} in {call}"]
    named += [f"{name_ranks(ranks)} in {call}" for call, ranks in others]
    where = f"{', '.join(named)}. " if others else ""
    return CommunicationError(
        f"torchbagua: ranks are out of step in {calls[communicator.rank]}{f': {difference}' if difference else ''}. "
        f"{where}Every rank must run the same backward passes, optimizer "
        "steps, averaged_weights, state loads, layer unfreezes, aborts and resumes, in the same order. Check whether a "
        "rank ran out of data, left early or skipped a step of an optimizer; if a GradScaler can skip a step on one "
        "rank, pass it to attach(..., grad_scaler=scaler)."
    )


def fingerprint(value: object) -> int:
    """Return a number below 2^56 that identifies `value` by its repr."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def fingerprint_of_values(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number below 2^56 that identifies the values of these tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        found.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))  # numpy may be missing
    return int.from_bytes(found.digest()[:7], "big")
