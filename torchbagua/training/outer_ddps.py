"""Finds the DDPs around modules and around their parts: those that exist at attach, and those that call them later."""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import is_joining
from torchbagua.training.ddp import JOIN_REFUSAL, ModuleHook, check_around
from torchbagua.training.setup import TrainingSetup

_PROBE = "torchbagua: is it still there?"


def ddps_of(modules: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDPs in `modules`, then the DDPs around the other modules or around parts of them."""
    ddps = [module for module in modules if isinstance(module, DistributedDataParallel)]
    plain = [module for module in modules if not isinstance(module, DistributedDataParallel)]
    return ddps + [ddp for ddp in ddps_around(plain) if ddp not in ddps]


def ddps_around(modules: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDPs that train parameters of `modules`, and that can still be called.

    They wrap one of the modules, a part of it, or a module that contains it. A module has no reference to its DDP, so
    all objects of the process are searched. The search takes tenths of a second, and is skipped if no parameter has a
    reducer.
    """
    if not any(map(_may_have_reducer, modules)):
        return []
    gc.collect()  # a DDP is part of reference cycles: an unused DDP exists until it is collected
    return search_ddps_around(modules) if any(map(_may_have_reducer, modules)) else []


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


def search_ddps_around(modules: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Search all objects for the DDPs, also unused ones, that have a trained parameter of `modules`."""
    own = {id(parameter) for module in modules for parameter in module.parameters() if parameter.requires_grad}
    # Not gc.get_objects: CPython 3.11 fails there while a tuple is referenced that another thread is still building
    # from an iterator. Not isinstance, which queries proxies for their class.
    referrers = gc.get_referrers(*_with_subclasses(DistributedDataParallel))
    found = [item for item in referrers if DistributedDataParallel in type(item).__mro__]
    return [ddp for ddp in found if not own.isdisjoint(_averaged_ids(ddp))]


def _averaged_ids(ddp: DistributedDataParallel) -> list[int]:
    """Return the ids of the parameters that `ddp` averages. Another thread may still be constructing it."""
    module, ignored = vars(ddp).get("_modules", {}).get("module"), vars(ddp).get("parameters_to_ignore", ())
    named = [] if module is None else module.named_parameters()
    return [id(parameter) for name, parameter in named if name not in ignored]


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *chain.from_iterable(map(_with_subclasses, cls.__subclasses__()))]


class CallerWatch:
    """Reports each DistributedDataParallel that calls modules in its forward. It finds only DDPs that are in use.

    It is a forward pre-hook of the modules, until `close`.

    Args:
        modules: the modules.
        known: the DDPs that are expected to call them.
        on_new: called once with each other DDP, within the DDP's forward and before the module's forward.

    Attributes:
        modules: the same.
        on_new: the same; may be replaced.
        new: the other DDPs so far.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        known: Sequence[DistributedDataParallel],
        on_new: Callable[[DistributedDataParallel], None] | None = None,
    ) -> None:
        self.modules = modules
        self._known = list(known)
        self.on_new = on_new
        self.new: list[DistributedDataParallel] = []
        self._is_seen = dict.fromkeys(modules, False)
        self._installed = ExitStack()
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # a ScriptModule takes no hooks
                self._installed.callback(module.register_forward_pre_hook(ModuleHook(self)).remove)

    @property
    def has_seen_all(self) -> bool:
        """Whether each module's forward was called. A forward that is compiled, or calls no hooks, is not seen."""
        return bool(self.modules) and all(self._is_seen.values())

    def close(self) -> None:
        """Stop reporting. A second call does nothing."""
        self._installed.close()

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Check which DDPs are calling a module; a forward pre-hook."""
        if torch.compiler.is_compiling() or module not in self._is_seen:  # a copy of a module has this hook too
            return
        self._is_seen[module] = True
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


def refuse_later_ddps(setup: TrainingSetup, watch: CallerWatch) -> None:
    """Raise RuntimeError if a DDP that attach did not know has averaged gradients since; also from now on.

    Args:
        setup: the modules. Called within the loop's first step.
        watch: of the modules that no DDP may wrap later.
    """
    found = watch.new
    if not watch.has_seen_all:
        plain = [module for module in setup.modules if not isinstance(module, DistributedDataParallel)]
        found = [ddp for ddp in search_ddps_around(plain) if ddp not in setup.ddps]
    if found:
        _refuse_later_ddp(found[0])
    watch.on_new = _refuse_later_ddp


def _refuse_later_ddp(ddp: DistributedDataParallel) -> None:
    raise RuntimeError(
        f"torchbagua: {type(ddp.module).__name__} was wrapped in DistributedDataParallel after attach, so "
        "DistributedDataParallel averages gradients alongside the algorithm: wrap it before attach, and pass attach "
        "the DistributedDataParallel, or a list of all modules"
    )


def check_caller(algorithm: str, setup: TrainingSetup, ddp: DistributedDataParallel, *, within_nodes: bool) -> None:
    """Raise ValueError if a weight algorithm cannot disable the communication of `ddp`; called in its forward.

    `ddp` wraps the same module as the DDP that attach was given, but is a different one.
    """
    check_around(setup.inner, ddp)
    if is_joining(ddp):
        raise ValueError(f"torchbagua: {JOIN_REFUSAL}")
    if within_nodes:
        raise ValueError(
            f"torchbagua: {algorithm} with hierarchical=True has one DistributedDataParallel "
            f"average gradients within nodes, but {type(setup.inner).__name__} was called by another "
            "DistributedDataParallel; call the one that attach was given"
        )
