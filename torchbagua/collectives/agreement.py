"""What ranks tell each other before they communicate: small facts, exchanged over the store of their group."""

import contextlib
import json
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

# In place of the facts of a rank that waited in vain, and may come again.
_WITHDRAWN = ""

Facts = Mapping[str, bool | int | float | str | list[int] | None]


def exchange_facts(store: dist.Store, rank: int, size: int, facts: Facts, timeout: timedelta) -> list[Facts]:
    """Publish `facts` under this rank in `store` and return those of all ranks, in rank order.

    Raises:
        TimeoutError: a rank published nothing within `timeout`; names the missing ranks.
    """
    keys = [f"facts/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(facts))
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
        f"torchbagua: ranks {missing} of {size} did not reach reify or attach within {timeout.total_seconds():g} s "
        f"(every rank of the group must call it, in the same order)"
    )


def check_agreement(all_facts: list[Facts], fields: Mapping[str, str]) -> None:
    """Raise where ranks differ in one of `fields` (name of the fact -> how to call it in the message).

    Raises:
        ValueError: names the first rank that differs from rank 0, the field and both values; the same on every rank.
    """
    for name, title in fields.items():
        expected = all_facts[0].get(name)
        for rank, facts in enumerate(all_facts):
            if facts.get(name) != expected:
                raise ValueError(
                    f"torchbagua: ranks disagree in {title}: rank 0 has {expected!r}, rank {rank} has "
                    f"{facts.get(name)!r}; it must be the same on every rank"
                )
