"""The private name of torch that mlbench's optimizers cannot do without; tests/test_torch_private.py has its canary."""

from collections.abc import Callable
from typing import Any


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer class's `step` without the calls of hooks that torch puts around it at the first instance.

    An override of `step` that calls it would call the hooks twice. Seen in 2.11 to 2.13.
    """
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked
