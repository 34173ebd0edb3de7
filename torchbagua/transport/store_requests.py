"""The store of a group. Several texts take one request, if the store has multi-key calls; FileStore does not."""

from contextlib import suppress

import torch.distributed as dist

from torchbagua._torch import store_of


def require_store(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the ranks of a group share; raise ValueError if the group has none."""
    store = store_of(process_group)
    if store is None:
        raise ValueError(
            "BaguaProcessGroup: process_group must have a store, got a group without one, as mpi creates; call "
            'init_process_group("gloo"), and pass the group that new_group(backend="mpi") returns'
        )
    return store


def announce(store: dist.Store, what: str, rank: int) -> None:
    """Announce to `missing_ranks` that `rank` has reached a point that `what` names."""
    store.set(f"{what}/{rank}", "")


def missing_ranks(store: dist.Store, what: str, size: int) -> list[int]:
    """Return the ranks that have not announced `what`; none if the store no longer responds."""
    with suppress(RuntimeError):
        return [rank for rank in range(size) if not store.check([f"{what}/{rank}"])]
    return []


def read_texts(store: dist.Store, keys: list[str]) -> list[str]:
    """Return the text under each of `keys`; wait for the keys that are not set yet."""
    if len(keys) > 1 and store.has_extended_api():  # type: ignore[attr-defined]
        return [text.decode() for text in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


def write_text(store: dist.Store, keys: list[str], text: str) -> None:
    """Write the same text under each of `keys`."""
    if len(keys) > 1 and store.has_extended_api():  # type: ignore[attr-defined]
        store.multi_set(keys, [text] * len(keys))  # type: ignore[attr-defined]
        return
    for key in keys:
        store.set(key, text)
