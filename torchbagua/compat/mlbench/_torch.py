"""The private name of torch that mlbench's optimizers need; tests/test_torch_private.py has its canary."""

from collections.abc import Callable
from typing import Any


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer class's `step` without the hook calls that torch wraps around it at the first instance.

    Without this, an override of `step` that calls it would call the hooks twice. Checked in 2.11 to 2.13.
    """
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked
