"""Several texts in one request to a store, if it has the calls for that: FileStore does not."""

import torch.distributed as dist


def read_texts(store: dist.Store, keys: list[str]) -> list[str]:
    """Return what lies under each of `keys`; waits for those under which nothing lies yet."""
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
