"""Finds the DistributedDataParallel that wrap a module: those that exist at attach, and those that call it later."""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from torchbagua.training.module_hook import ModuleHook

_PROBE = "torchbagua: is it still there?"


def ddps_around(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the DDPs that wrap `module`, or a module that contains it, and that can still be called.

    A module has no reference to its DDP, so all objects of the process are searched. The search takes tenths of a
    second, and is skipped if no parameter has a reducer.
    """
    if not _may_have_reducer(module):
        return []
    gc.collect()  # a DDP is part of reference cycles: an unused DDP exists until it is collected
    return search_ddps_around(module) if _may_have_reducer(module) else []


def _may_have_reducer(module: torch.nn.Module) -> bool:
    """Return whether anything keeps the autograd node that accumulates a parameter's gradient alive.

    The reducer of a DDP does, and so does the graph of a loss that is still referenced. Otherwise each access creates a
    new node, without the metadata that was written to the previous one.
    """
    with torch.inference_mode(False):
        return any(_keeps_node(parameter) for parameter in module.parameters() if parameter.requires_grad)


def _keeps_node(parameter: torch.nn.Parameter) -> bool:
    _notes_at_node(parameter)[_PROBE] = True
    return _PROBE in _notes_at_node(parameter) and _notes_at_node(parameter).pop(_PROBE)


def _notes_at_node(parameter: torch.nn.Parameter) -> dict[str, bool]:
    notes: Any = get_gradient_edge(parameter).node.metadata  # torch declares a method, and it is a dict
    return cast(dict[str, bool], notes)


def search_ddps_around(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """Search all objects for the DDPs, also unused ones, that wrap `module` or a module that contains it."""
    found: dict[int, torch.nn.Module] = {}
    parents = _parents_of([module])
    while new := {id(parent): parent for parent in parents if id(parent) not in found}:
        found |= new
        parents = _parents_of(list(new.values()))
    return [parent for parent in found.values() if isinstance(parent, DistributedDataParallel)]


def _parents_of(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    # Not gc.get_objects: CPython 3.11 fails there while a tuple is referenced that another thread is still building
    # from an iterator.
    ids = {id(module) for module in modules}
    children = [
        referrer
        for referrer in gc.get_referrers(*modules)
        if isinstance(referrer, dict) and any(id(value) in ids for value in list(referrer.values()))
    ]
    children_ids = {id(names) for names in children}
    if not children:
        return []
    # The referrer of a dict of children is its module, or that module's __dict__.
    owners = gc.get_referrers(*children)
    states = [owner for owner in owners if isinstance(owner, dict) and id(owner.get("_modules")) in children_ids]
    if states:
        owners += gc.get_referrers(*states)
    # Not isinstance, which queries proxies for their class.
    found = {id(owner): owner for owner in owners if torch.nn.Module in type(owner).__mro__}
    return [parent for parent in found.values() if id(vars(parent).get("_modules")) in children_ids]


class CallerWatch:
    """Reports each DistributedDataParallel that calls a module in its forward. It finds only DDPs that are in use.

    It is a forward pre-hook of the module, until `close`.

    Args:
        module: the module.
        known: the DDPs that are expected to call it.
        on_new: called once with each other DDP, within the DDP's forward and before the module's forward.

    Attributes:
        on_new: the same; may be replaced.
        new: the other DDPs so far.
        has_seen: whether the module's forward was called. A forward that is compiled, or calls no hooks, is not seen.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        known: Sequence[DistributedDataParallel],
        on_new: Callable[[DistributedDataParallel], None] | None = None,
    ) -> None:
        self._module = module
        self._known = list(known)
        self.on_new = on_new
        self.new: list[DistributedDataParallel] = []
        self.has_seen = False
        self._installed = ExitStack()
        if not isinstance(module, torch.jit.ScriptModule):  # a ScriptModule takes no hooks
            self._installed.callback(module.register_forward_pre_hook(ModuleHook(self)).remove)

    def close(self) -> None:
        """Stop reporting. A second call does nothing."""
        self._installed.close()

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Check which DDPs are calling the module; a forward pre-hook."""
        if torch.compiler.is_compiling() or module is not self._module:
            return
        self.has_seen = True
        for ddp in _calling_ddps():
            if ddp not in self._known and ddp not in self.new:
                if self.on_new is not None:
                    self.on_new(ddp)
                self.new.append(ddp)


def _calling_ddps() -> list[DistributedDataParallel]:
    # Not `DistributedDataParallel._active_ddp_module`, which all threads share.
    forward = DistributedDataParallel.forward.__code__
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is forward:
            found.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return found
