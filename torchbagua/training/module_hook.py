"""A hook of an attached module, which does nothing in copies of the module."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class ModuleHook:
    """A hook of a module or of its forward. In a copied or unpickled module it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a no-op function of the standard library, so that loading the pickle does not need this package."""
        return getattr, (nullcontext(), "__exit__")
