"""The layout of the tensors that an FSDP parameter group communicates: a rank's row, its shards end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua._torch import fsdp_param_groups, fsdp_shards
from torchbagua._warnings import warn_user
from torchbagua.codecs.blocks import TensorSpec


@dataclass(frozen=True)
class Row:
    """The shards that form a row.

    Attributes:
        parameter_names: the names of their parameters.
        lengths: the lengths of the shards, in elements, padded.
    """

    parameter_names: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements in the row."""
        return sum(self.lengths)

    def spec(self, x: torch.Tensor, name: str) -> TensorSpec:
        """Return the TensorSpec, for collectives, of a row named `name` with the dtype and device of `x`."""
        return TensorSpec(self.lengths, x.dtype, x.device, name)


class CommunicatingPart:
    """A part on which fully_shard was called, with one parameter group that communicates in one collective.

    Args:
        part: the FSDPModule.
        param_group: its FSDP parameter group.
        label: the part's name in events and errors.
        parameter_names: the names of all its parameters, in their order in a row.

    Attributes:
        part, param_group, label: the same.
        name: the name of its gradients in events and errors.
    """

    def __init__(self, part: Any, param_group: Any, label: str, parameter_names: Sequence[str]) -> None:
        self.part = part
        self.param_group = param_group
        self.label = label
        self.name = f"gradients of {label}"
        self._parameter_names = tuple(parameter_names)
        self._warned_lengths: set[int] = set()

    @property
    def whole_row(self) -> Row:
        """The row of all its parameters, which are gathered in one collective."""
        return Row(self._parameter_names, tuple(length for _, length in fsdp_shards(self.param_group)))

    def row(self, num_elements: int) -> Row:
        """Return the row of the parameters that are trained now: layers may be frozen and unfrozen at any time.

        If that row does not have `num_elements` elements, parameters without a gradient are missing, and FSDP does not
        report which. The row returned then treats all elements as one parameter, with a RuntimeWarning once per length.
        """
        shards = zip(self._parameter_names, fsdp_shards(self.param_group), strict=True)
        trained = [(name, length) for name, (parameter, length) in shards if parameter.requires_grad]
        row = Row(tuple(name for name, _ in trained), tuple(length for _, length in trained))
        if row.num_elements == num_elements:
            return row
        if num_elements not in self._warned_lengths:
            self._warned_lengths.add(num_elements)
            warn_user(
                f"torchbagua: {self.name}: not all parameters had a gradient, and FSDP does not report which. All "
                "parameters share blocks, so small values lose precision; call "
                "set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        return Row((self.name,), (num_elements,))


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
            found.setdefault(id(param_group), CommunicatingPart(part, param_group, label, parameter_names))
    return list(found.values())


def check_parameters_inside(module: torch.nn.Module, parts: Sequence[CommunicatingPart]) -> None:
    """Raise ValueError if a part communicates in one collective with parameters outside of the module."""
    for part in parts:
        if "" in part.whole_row.parameter_names:
            raise ValueError(
                f"attach: {part.label} communicates together with parameters that are not in "
                f"{type(module).__name__}, as after fully_shard([...]); attach to a module that contains all of them"
            )
