"""Detects weights that a user loads into an attached module, and notifies the runner when training continues."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua._warnings import warn_user
from torchbagua.runtime.parameters import local_shard, name_of_shard, reshard
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.checks import TrainingSetup
from torchbagua.training.ddp import ModuleHook


class WeightLoads:
    """Watches every `load_state_dict` of an attached module, or of a part of it, until `close`.

    Loaded weights take effect when the next step begins, and not at the load. A loop may swap in other weights, for
    instance a running mean for an evaluation, and load its own weights again; then the runner is not notified. Until
    the next step this takes two more copies of the loaded weights in memory.
    """

    _are_refused = False
    _named_buckets: list[Any] | None = None

    def __init__(self, setup: TrainingSetup, runner: WeightRunner) -> None:
        self._module = setup.inner
        self._sharded_parts = list(setup.sharded_parts.values())
        self._runner = runner
        self._loads: dict[str, _Load] = {}  # since the last step, by the tensor's name in the buckets
        self._names: dict[int, str] = {}  # names in `_named_buckets`, by the tensor's id
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._undo = ExitStack()
        for path, module in self._module.named_modules():
            self._install(module, path)

    def close(self) -> None:
        """Stop watching."""
        self._undo.close()
        self._take_loads()

    @torch.no_grad()
    def settle(self) -> None:
        """Notify the runner of weights loaded since the last step, unless the old weights have been restored."""
        if not self._loads:
            return
        loads = self._take_loads()
        reshard(self._sharded_parts)
        for load in loads.values():
            if load.after is None:  # the load raised
                load.note()
        if _are_undone(list(loads.values())):
            return
        runner = self._runner
        if runner.process_group.rank == 0:
            warn_user(
                f"torchbagua: {len(loads)} weights were loaded after attach: {runner.name} continues "
                f"from them, {runner.load_effect}. To resume a run, load the attachment's state after the weights",
                UserWarning,
            )
        runner.impl.weights_loaded({name: load.after for name, load in loads.items() if load.after is not None})

    @torch.no_grad()
    def take_all(self) -> None:
        """Notify the runner that all parameters have changed."""
        self._take_loads()
        reshard(self._sharded_parts)
        tracked = self._tracked_names()
        values = {}
        for path, parameter in self._module.named_parameters():
            if (name := self._name_of(path, parameter, tracked)) is not None:
                values[name] = local_shard(parameter).clone()
        self._runner.impl.weights_loaded(values)
        self._runner.reset_if_needed()  # parameters may have been replaced

    @contextmanager
    def discard_loads(self) -> Iterator[None]:
        """Forget the loads so far if the block, which loads the matching state, does not raise."""
        loads = self._take_loads()
        try:
            yield
        except BaseException:
            self._loads = loads
            self._runner.note_loading(loads)
            raise

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse loads in the block, in which the module holds the mean of all ranks' weights."""
        self._are_refused = True
        try:
            yield
        finally:
            self._are_refused = False

    def _settle_at_next_step(self) -> None:
        if not self._loads:
            for watch in self._runner.step_watches:
                watch.call_at_next_start(lambda *_: self.settle())

    def _take_loads(self) -> dict[str, "_Load"]:
        """Return the loads since the last step, and forget them."""
        loads, self._loads = self._loads, {}
        self._runner.note_loading({})
        return loads

    def _install(self, module: torch.nn.Module, path: str) -> None:
        """Watch loads into `module`, which is the attached module's submodule `path`."""
        if module in self._hooked:
            return
        self._hooked.add(module)

        def before(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
            self._before_load(module, path, state, prefix)

        self._undo.callback(module.register_load_state_dict_pre_hook(ModuleHook(before)).remove)
        self._undo.callback(module.register_load_state_dict_post_hook(ModuleHook(self._after_load)).remove)

    @torch.no_grad()
    def _before_load(self, module: torch.nn.Module, path: str, state: Mapping[str, Any], prefix: str) -> None:
        if self._are_refused:
            raise RuntimeError(
                "torchbagua: weights were loaded within averaged_weights, which restores each rank's own weights at "
                "its end, so the load would be lost. Load before the block, which then holds the mean of the loaded "
                "weights, or after it"
            )
        reshard(self._sharded_parts)
        for name, child in module.named_children():  # a child that is new is loaded next
            self._install(child, f"{path}.{name}" if path else name)
        tracked = self._tracked_names()
        for own_name, tensor in _own_tensors(module).items():
            known = self._name_of(f"{path}.{own_name}" if path else own_name, tensor, tracked)
            if known is not None and prefix + own_name in state and known not in self._loads:
                self._settle_at_next_step()
                self._loads[known] = _Load(module, own_name, local_shard(tensor).clone())
        self._runner.note_loading(self._loads)

    @torch.no_grad()
    def _after_load(self, module: torch.nn.Module, _: Any) -> None:
        for load in self._loads.values():
            if load.module is module:
                load.note()

    def _tracked_names(self) -> set[str]:
        """Return the names of the averaged weights. Call it before `_name_of`."""
        if self._named_buckets is not self._runner.buckets:
            self._named_buckets = self._runner.buckets
            self._names = {id(item.parameter): item.name for bucket in self._runner.buckets for item in bucket.tensors}
        return set(self._names.values())

    def _name_of(self, path: str, tensor: torch.Tensor, tracked: set[str]) -> str | None:
        """Return the name of a tensor in the buckets; None if it is not averaged."""
        if id(tensor) in self._names:  # also if the module was renamed, or has several names
            return self._names[id(tensor)]
        name = name_of_shard(path, tensor)  # the tensor may have replaced one in the buckets
        return name if name in tracked else None


@dataclass
class _Load:
    """The effect on one weight of all loads since the last step."""

    module: torch.nn.Module
    name: str  # in `module`
    before: torch.Tensor  # the value before the first load
    after: torch.Tensor | None = None  # after the last load, `before` itself if equal; None until a load has finished
    has_changed: bool = False  # whether any of the loads changed the weight

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter, and not a buffer."""
        return isinstance(getattr(self.module, self.name), torch.nn.Parameter)

    def tensor(self) -> torch.Tensor:
        """Return the current weight; for a DTensor, this rank's shard."""
        tensor: torch.Tensor = getattr(self.module, self.name)
        return local_shard(tensor)

    def note(self) -> None:
        """Record the value that a load has left."""
        now = self.tensor()
        self.after = self.before if _are_equal(now, self.before) else now.clone()
        self.has_changed |= self.after is not self.before


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _are_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors have equal elements. NaN equals NaN."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def _are_undone(loads: Sequence[_Load]) -> bool:
    """Return whether the weights have their values from before these loads again.

    Returns False if no load changed a value: on other ranks the same load may have changed values.
    """
    if not any(load.has_changed for load in loads):
        return False
    # Only parameters: a forward may have changed buffers since.
    by_hand = [_are_equal(load.tensor(), load.before) for load in loads if load.is_parameter]
    return all(load.after is load.before for load in loads) or (bool(by_hand) and all(by_hand))
