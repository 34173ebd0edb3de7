"""The table of native operations, and what they refuse.

An operation is a function in plain torch. Its schema is read from the function's annotations, and the function serves
every device until a library, or NVRTC, adds kernels that take precedence. An operation that refuses its arguments
raises ValueError and has written nothing. What would let a kernel leave its tensors is refused, in the words of
csrc_cuda/arguments.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operation:
    """One operation; called, it checks its arguments and computes in plain torch.

    Attributes:
        family: what it belongs to, a codec's name or "qadam"; the file of its CUDA kernels is called so.
        name: `torchbagua::<name>`, the family and what is done.
        check: raises ValueError for arguments that no kernel may be given.
        compute: does it, for any device.
    """

    family: str
    name: str
    check: Callable[..., None]
    compute: Callable[..., None]

    def __call__(self, *arguments: Any, **numbers: float) -> None:
        """Check the arguments, then compute."""
        self.check(*arguments, **numbers)
        self.compute(*arguments, **numbers)


OPERATIONS: dict[str, Operation] = {}


def register(
    family: str, suffix: str, check: Callable[..., None], compute: Callable[..., None], writes: tuple[str, ...]
) -> None:
    """Add the operation `<family>_<suffix>` to the table, and give it to torch; `writes` names what it writes."""
    name = f"{family}_{suffix}"
    operation = OPERATIONS[name] = Operation(family, name, check, compute)
    torch.library.define(f"torchbagua::{name}", torch.library.infer_schema(compute, mutates_args=writes))
    torch.library.impl(f"torchbagua::{name}", "default", operation.__call__)
    # Without it the plain torch would run on tensors that have no values.
    torch.library.register_fake(f"torchbagua::{name}", check)


# "default", "avx2" or "avx512": what the loaded CPU library uses. It has no kernel until a library is loaded.
torch.library.define("torchbagua::cpu_instruction_set", "() -> str")


def describe(tensor: Tensor) -> str:
    """Dtype, shape, device and, where it is not the usual, layout of `tensor`, for a message."""
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def refusal(operation: str, argument: str, allowed: str, got: object) -> ValueError:
    """The error for an argument."""
    return ValueError(f"torchbagua::{operation}: {argument} must be {allowed}, got {got}")


class Call(NamedTuple):
    """A call of an operation, and the device that all its tensors must be on: that of the first.

    Each method raises ValueError for a tensor that is not contiguous, elsewhere, or of another type or shape.
    """

    operation: str
    device: torch.device

    def elements(self, argument: str, tensor: Tensor, num_elements: int | None = None) -> None:
        """[N] or [num_elements], of a type that codecs encode."""
        self._require(argument, tensor, ELEMENT_TYPES, ("N" if num_elements is None else num_elements,))

    def floats(self, argument: str, tensor: Tensor, num_elements: int | None = None) -> None:
        """[N] or [num_elements] float32."""
        self._require(argument, tensor, (torch.float32,), ("N" if num_elements is None else num_elements,))

    def wire(self, wire: Tensor, num_bytes: int | None = None) -> None:
        """[W] or [num_bytes] uint8."""
        self._require("wire", wire, (torch.uint8,), ("W" if num_bytes is None else num_bytes,))

    def rows(self, rows: Tensor) -> None:
        """[R, W] uint8, at least one row."""
        self._require("rows", rows, (torch.uint8,), ("R", "W"))
        if not len(rows):
            raise refusal(self.operation, "rows", "of at least one row", describe(rows))

    def table(self, table: Tensor) -> None:
        """[B, 4] int64; what it holds is not looked at."""
        self._require("table", table, (torch.int64,), ("B", 4))

    def _require(
        self, argument: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | str, ...]
    ) -> None:
        """`shape` has the name of a size that may be any; only the last may be given."""
        last = shape[-1]
        if (
            tensor.dtype in dtypes
            and tensor.ndim == len(shape)
            and (type(last) is str or tensor.shape[-1] == last)
            and tensor.is_contiguous()
            and tensor.device == self.device
        ):
            return
        allowed = f"contiguous {names_of(dtypes)} [{', '.join(map(str, shape))}] on {self.device}"
        raise refusal(self.operation, argument, allowed, describe(tensor))


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """As in "float32, bfloat16 or float16"."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
