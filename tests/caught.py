"""Collects the warnings of torchbagua that a block gives, from all threads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torchbagua_warnings() -> Iterator[list[str]]:
    """Yields a list that has the messages after the block."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if "torchbagua" in str(warning.message)]
