"""The parts of a sharded module: the ranks that share them, and the row of shards that each part communicates."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua._warnings import warn_user
from torchbagua.codecs.base import TensorSpec
from torchbagua.fsdp._torch import (
    fsdp_computed_with,
    fsdp_modules,
    fsdp_param_groups,
    fsdp_shards,
)
from torchbagua.training.ddp import ModuleHook


@dataclass(frozen=True)
class Row:
    """A rank's shards of some parameters, end to end."""

    parameter_names: tuple[str, ...]
    lengths: tuple[int, ...]  # of the shards, in elements, padded
    members: tuple[int, ...]  # the places of the parameters among those of the part; empty if they are unknown

    @property
    def num_elements(self) -> int:
        return sum(self.lengths)

    def spec(self, x: torch.Tensor, name: str) -> TensorSpec:
        """Return the TensorSpec, for collectives, of a row named `name` with the dtype and device of `x`."""
        return TensorSpec(self.lengths, x.dtype, x.device, name)


class CommunicatingPart:
    """A part on which fully_shard was called, with one parameter group that communicates in one collective."""

    def __init__(self, number: int, part: Any, param_group: Any, label: str, parameter_names: Sequence[str]) -> None:
        self.number = number
        self.part = part
        self.param_group = param_group
        self.label = label
        self.name = f"gradients of {label}"  # in events and errors
        self.parameter_names = tuple(parameter_names)
        self._warned_lengths: set[int] = set()
        # The parameters that got a gradient since the last row; the hooks that record them, by their places.
        self._reached: list[torch.Tensor] = []
        self._hooks: dict[int, RemovableHandle] = {}
        self._partial: Row | None = None

    @property
    def whole_row(self) -> Row:
        """The row of all its parameters, which FSDP gathers in one collective."""
        return self._row_of(range(len(self.parameter_names)))

    def watch_gradients(self) -> ExitStack:
        """Record which parameters get a gradient, for `row`, until the returned stack is closed.

        FSDP does not report it: a reduce-scatter gets the gradients end to end.
        """
        undo = ExitStack()
        for module in fsdp_modules(self.param_group):  # FSDP's own hook, which gathers the parameters, runs before
            undo.callback(module.register_forward_pre_hook(ModuleHook(self._before_forward)).remove)
        undo.callback(self._remove_hooks)
        return undo

    def row(self, num_elements: int) -> Row:
        """Return the row of the parameters that are trained now and have a gradient, which has `num_elements` elements.

        If these are unknown, the row treats all elements as one parameter, with a RuntimeWarning once per length.
        """
        shards = enumerate(fsdp_shards(self.param_group))
        row = self._row_of(place for place, (parameter, _) in shards if parameter.requires_grad)
        if row.num_elements != num_elements:
            row = self._partial_row(num_elements)
        self._reached.clear()
        return row

    def _row_of(self, members: Iterable[int]) -> Row:
        members = tuple(members)
        shards = fsdp_shards(self.param_group)
        names = tuple(self.parameter_names[place] for place in members)
        return Row(names, tuple(shards[place][1] for place in members), members)

    def _partial_row(self, num_elements: int) -> Row:
        if self._reached or self._partial is None:  # else a second collective of the same backward needs the row
            reached = set(map(id, self._reached))
            computed_with = enumerate(fsdp_computed_with(self.param_group))
            self._partial = self._row_of(place for place, parameter in computed_with if id(parameter) in reached)
        if self._partial.num_elements == num_elements:
            return self._partial
        self._partial = None
        self._add_hooks()  # for the next backward: forward has bypassed the module's hooks
        if num_elements not in self._warned_lengths:
            self._warned_lengths.add(num_elements)
            warn_user(
                f"torchbagua: {self.name}: not all parameters had a gradient, and FSDP does not report which. All "
                "parameters share blocks, so small values lose precision; call "
                "set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        return Row((self.name,), (num_elements,), ())

    def _before_forward(self, *_: object) -> None:
        if len(self._hooks) < len(self.parameter_names) and not torch.compiler.is_compiling():
            self._add_hooks()

    def _add_hooks(self) -> None:
        for place, parameter in enumerate(fsdp_computed_with(self.param_group)):
            # Torch takes no hook of a frozen parameter, which may be unfrozen later.
            if parameter is not None and parameter.requires_grad and place not in self._hooks:
                self._hooks[place] = parameter.register_post_accumulate_grad_hook(self._reached.append)

    def _remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._reached.clear()


def communicating_parts(module: torch.nn.Module, parts: Mapping[str, Any]) -> list[CommunicatingPart]:
    """Return the parts of `module` that communicate, one for each parameter group.

    A parameter outside of the module has the name "".
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[int, CommunicatingPart] = {}
    for part_name, part in parts.items():
        for param_group in fsdp_param_groups(part):  # after fully_shard([a, b]), a and b have the same group
            label = part_name or type(part).__name__
            parameter_names = [names.get(id(parameter), "") for parameter, _ in fsdp_shards(param_group)]
            part_of_group = CommunicatingPart(len(found), part, param_group, label, parameter_names)
            found.setdefault(id(param_group), part_of_group)
    return list(found.values())


def check_parameters_inside(module: torch.nn.Module, parts: Sequence[CommunicatingPart]) -> None:
    """Raise ValueError if a part communicates in one collective with parameters outside of the module."""
    for part in parts:
        if "" in part.parameter_names:
            raise ValueError(
                f"attach: {part.label} communicates together with parameters that are not in "
                f"{type(module).__name__}, as after fully_shard([...]); attach to a module that contains all of them"
            )
