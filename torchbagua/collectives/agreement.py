"""What ranks agree on: settings, over the store of their group, and how far they have come, over the group itself."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.errors import CommunicationError
from torchbagua.collectives.exchange import Exchange

# In place of the settings of a rank that waited in vain, and may come again.
_WITHDRAWN = ""

Settings = Mapping[str, bool | int | float | str | list[int] | None]


def gather_settings(store: dist.Store, rank: int, size: int, settings: Settings, timeout: timedelta) -> list[Settings]:
    """Publish `settings` under this rank in `store` and return those of all ranks, in rank order.

    Raises:
        TimeoutError: a rank published nothing within `timeout`; names the missing ranks.
    """
    keys = [f"settings/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(settings))
    deadline_s = time.monotonic() + timeout.total_seconds()
    # Not all came in time: a DistStoreError, or of a FileStore a bare RuntimeError. What else is wrong the loop raises.
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timeout)
    while True:
        found = [store.get(key).decode() if store.check([key]) else None for key in keys]
        if all(found):
            return [json.loads(text) for text in found if text]
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    store.set(keys[rank], _WITHDRAWN)
    missing = [other for other, text in enumerate(found) if text is None]
    missing = missing or [other for other, text in enumerate(found) if text == _WITHDRAWN]
    raise TimeoutError(
        f"torchbagua: ranks {missing} of {size} did not come within {timeout.total_seconds():g} s: every rank of the "
        "group must call reify, attach or an aggregation, in the same order"
    )


def check_same_settings(all_settings: list[Settings], fields: Mapping[str, str]) -> None:
    """Raise where ranks differ in one of `fields` (name of the setting -> how to call it in the message).

    Raises:
        ValueError: names the first rank that differs from rank 0, the field and both values; the same on every rank.
    """
    for name, title in fields.items():
        expected = all_settings[0].get(name)
        for rank, settings in enumerate(all_settings):
            if settings.get(name) != expected:
                raise ValueError(
                    f"torchbagua: ranks disagree in {title}: rank 0 has {expected!r}, rank {rank} has "
                    f"{settings.get(name)!r}; it must be the same on every rank"
                )


def all_reduce_max(communicator: Communicator, values: Sequence[int], purpose: str) -> list[int]:
    """Return the largest of every value over the ranks, the same on all of them, in log2(n) exchanges.

    Args:
        communicator: whose ranks agree.
        values: as many on every rank.
        purpose: what for, in events and errors.

    Raises:
        CommunicationError: a peer is gone or did not take part within the group's timeout.
    """
    largest = torch.tensor(values, dtype=torch.int64)
    distance = 1
    while distance < communicator.size:
        source = communicator.rank_before(distance)
        theirs = torch.empty_like(largest)
        exchange = Exchange(
            communicator, "agreement", {source: theirs}, purpose, [(communicator.rank_after(distance), source)]
        )
        exchange.run(lambda target: largest)
        torch.maximum(largest, theirs, out=largest)
        distance *= 2
    return largest.tolist()


def fingerprint(value: object) -> int:
    """Return a number that stands for `value`, told by its repr, in what `require_same_progress` compares."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


class _Holder(NamedTuple):
    """A number, and the rank that has it; the largest of several is that of the largest number."""

    number: int
    rank: int

    def packed(self, size: int) -> int:
        """Return both as one number, of which the order is that of these."""
        return self.number * size + self.rank

    @classmethod
    def unpacked(cls, packed: int, size: int) -> "_Holder":
        """Return what `packed` holds."""
        return cls(*divmod(packed, size))


def require_same_progress(
    communicator: Communicator,
    progress: Mapping[str, int],
    purpose: str,
    value: int = 0,
    check_value: Callable[[int], object] = lambda value: None,
) -> int:
    """Return the largest `value` of all ranks, or raise the same error on all unless they have come equally far.

    Messages of other lengths would end the process in gloo, so ranks that may have come to different places compare
    this before.

    Args:
        communicator: whose ranks compare.
        progress: numbers below 2^40 by what the error calls them, as many on every rank.
        purpose: what is about to be done.
        value: any number.
        check_value: called with the largest value, before ranks compare their progress. It may raise.

    Raises:
        CommunicationError: two ranks differ; names both, what it is and both numbers. Or a peer is gone.
    """
    size, rank = communicator.size, communicator.rank
    highest = [_Holder(number, rank).packed(size) for number in progress.values()]
    # The largest of the negated numbers is the smallest.
    lowest = [_Holder(-number, rank).packed(size) for number in progress.values()]
    largest_value, *found = all_reduce_max(communicator, [value, *highest, *lowest], purpose)
    check_value(largest_value)
    holders = [_Holder.unpacked(packed, size) for packed in found]
    for name, high, low in zip(progress, holders[: len(progress)], holders[len(progress) :], strict=True):
        if high.number != -low.number:
            ends = {communicator.ranks[high.rank]: high.number, communicator.ranks[low.rank]: -low.number}
            (first, first_number), (second, second_number) = sorted(ends.items())
            raise CommunicationError(
                f"torchbagua: ranks are out of step in {purpose}: rank {first} has {first_number} {name}, rank "
                f"{second} has {second_number}. All ranks must do the same, in the same order: backward passes, "
                "optimizer steps, states loaded, layers set free, abort and resume. A rank that has run out of data, "
                "or left early, does not; nor does one that a GradScaler has made skip a step, unless it is given to "
                "attach(..., grad_scaler=scaler)."
            )
    return largest_value
