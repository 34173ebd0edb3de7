"""Modules that fully_shard has sharded (FSDP2): attach, how their gradients and weights are communicated, and replicas.

May import `training` and the layers below it.
Begin with attach_sharded.py, whose docstring has the execution order, then collectives.py.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchbagua.fsdp.attach_sharded import attach

if TYPE_CHECKING:
    from torchbagua.fsdp.replicas import align_blocks, register_backend

__all__ = ["align_blocks", "attach", "register_backend"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # only trainings with replicas need the others
        return getattr(importlib.import_module("torchbagua.fsdp.replicas"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
