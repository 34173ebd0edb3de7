"""The table of native operations, and the checks of their arguments.

An operation is a function in plain torch. Its schema is inferred from the annotations, and the function serves every
device until a library, or NVRTC, registers kernels that take precedence. An operation that rejects its arguments raises
ValueError before it writes anything. Arguments that would make a kernel access memory outside its tensors are rejected,
with the same messages as in csrc_cuda/arguments.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NativeOp:
    """One native operation. A call checks the arguments and computes in plain torch.

    Attributes:
        family: the group that it belongs to, such as a codec's name or "qadam"; also the name of its CUDA source file.
        check: raises ValueError for arguments that are invalid for every kernel.
        compute: computes the result, on any device.
        derived_numbers: computes from the numbers of a call the further numbers that its CUDA kernels take.
        is_cpu_only: whether it has kernels only for CPUs, where parts of tensors stay in the cache; on GPUs, callers
            run other operations one after the other instead.
    """

    family: str
    check: Callable[..., None]
    compute: Callable[..., None]
    derived_numbers: Callable[[Mapping[str, float]], list[float]]
    is_cpu_only: bool

    def __call__(self, *arguments: Any, **numbers: float) -> None:
        """Check the arguments, then compute."""
        self.check(*arguments, **numbers)
        self.compute(*arguments, **numbers)


# By name. Filled at import: __init__.py imports the modules that define operations.
NATIVE_OPS: dict[str, NativeOp] = {}


def define_op(
    family: str,
    suffix: str,
    check: Callable[..., None],
    compute: Callable[..., None],
    writes: tuple[str, ...],
    *,
    derived_numbers: Callable[[Mapping[str, float]], list[float]] = lambda numbers: [],
    is_cpu_only: bool = False,
) -> None:
    """Add the operation `<family>_<suffix>` to the table and register it; `writes` names the arguments it writes."""
    name = f"{family}_{suffix}"
    op = NATIVE_OPS[name] = NativeOp(family, check, compute, derived_numbers, is_cpu_only)
    torch.library.define(f"torchbagua::{name}", torch.library.infer_schema(compute, mutates_args=writes))
    # The fallback: torch calls it on every device without a registered kernel.
    torch.library.impl(f"torchbagua::{name}", "CompositeExplicitAutograd", op.__call__)
    # Without it, the plain torch would run on fake tensors, which have no values.
    torch.library.register_fake(f"torchbagua::{name}", check)


# Returns "default", "avx2" or "avx512": the instruction set of the loaded CPU library. No kernel exists before that.
torch.library.define("torchbagua::cpu_instruction_set", "() -> str")


def describe_tensor(tensor: Tensor) -> str:
    """Return the dtype, shape and device of `tensor`, and its layout if unusual, for an error message."""
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def refusal(operation: str, argument: str, allowed: str, got: object) -> ValueError:
    """Return the error for an invalid argument."""
    return ValueError(f"torchbagua::{operation}: {argument} must be {allowed}, got {got}")


class TensorKind(NamedTuple):
    """The allowed dtypes and the shape of a tensor. Last dimensions of the same name have equal sizes in a call."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | str, ...]


# The number of fields in a row of a table. The row of a sparse codec also has the number of elements to send.
_BLOCK_FIELDS, _SPARSE_FIELDS = 4, 5

# The kinds of the operations' arguments. The content of a table is not checked here.
ELEMENTS = TensorKind(ELEMENT_TYPES, ("N",))
FLOATS = TensorKind((torch.float32,), ("N",))
WIRE = TensorKind((torch.uint8,), ("W",))
ROWS = TensorKind((torch.uint8,), ("R", "W"))
TABLE = TensorKind((torch.int64,), ("B", _BLOCK_FIELDS))
SPARSE_TABLE = TensorKind((torch.int64,), ("B", _SPARSE_FIELDS))
DIVISOR = None  # a number rather than a tensor


def check_arguments(name: str, kinds: Mapping[str, TensorKind | None], *arguments: Any, **by_name: Any) -> None:
    """Raise ValueError for the first argument that is not of its kind or not on the device of the first argument.

    This check runs before every launch of NVRTC's kernels, so it is fast for valid arguments.
    """
    if by_name:
        given = {**dict(zip(kinds, arguments, strict=False)), **by_name}
        arguments = tuple(given[argument] for argument in kinds)
    device = arguments[0].device
    # The last sizes of the tensors so far, by the names in their kinds; a fixed size is its own name.
    sizes: dict[int | str, int] = {size: size for size in (_BLOCK_FIELDS, _SPARSE_FIELDS)}
    for value, (argument, kind) in zip(arguments, kinds.items(), strict=True):
        if kind is None:
            if not 0 < ctypes.c_float(value).value < math.inf:
                raise refusal(name, argument, "a positive finite float32", value)
            continue
        dtypes, shape = kind
        if (
            value.ndim != len(shape)
            or value.dtype not in dtypes
            or not value.is_contiguous()
            or value.device != device
            or sizes.setdefault(shape[-1], value.shape[-1]) != value.shape[-1]
        ):
            raise _tensor_refusal(name, argument, kind, sizes, device, value)
        if kind is ROWS and not len(value):
            raise refusal(name, argument, "a tensor of at least one row", describe_tensor(value))


def _tensor_refusal(
    name: str, argument: str, kind: TensorKind, sizes: Mapping[int | str, int], device: torch.device, tensor: Tensor
) -> ValueError:
    shape = ", ".join(str(sizes.get(size, size)) for size in kind.shape)
    return refusal(
        name, argument, f"contiguous {names_of(*kind.dtypes)} [{shape}] on {device}", describe_tensor(tensor)
    )


def names_of(*dtypes: torch.dtype) -> str:
    """Return the names of dtypes, such as "float32, bfloat16 or float16"."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
