"""The table of native operations, and what they refuse.

An operation is a function in plain torch. Its schema is read from the function's annotations, and the function serves
every device until a library, or NVRTC, adds kernels that take precedence. An operation that refuses its arguments
raises ValueError and has written nothing. What would let a kernel leave its tensors is refused, in the words of
csrc_cuda/arguments.h.
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
    """One native operation; called, it checks its arguments and computes in plain torch.

    Attributes:
        family: what it belongs to, a codec's name or "qadam"; the file of its CUDA kernels is called so.
        check: raises ValueError for arguments that no kernel may be given.
        compute: does it, for any device.
        derived_numbers: what its CUDA kernels take after the numbers of a call, formed of these.
        is_of_cpus: whether it has kernels for CPUs alone, in whose caches parts of tensors stay; on GPUs its callers
            take other operations in turn.
    """

    family: str
    check: Callable[..., None]
    compute: Callable[..., None]
    derived_numbers: Callable[[Mapping[str, float]], list[float]]
    is_of_cpus: bool

    def __call__(self, *arguments: Any, **numbers: float) -> None:
        """Check the arguments, then compute."""
        self.check(*arguments, **numbers)
        self.compute(*arguments, **numbers)


# By name. Filled at import: __init__.py imports the files that define operations.
NATIVE_OPS: dict[str, NativeOp] = {}


def define_op(
    family: str,
    suffix: str,
    check: Callable[..., None],
    compute: Callable[..., None],
    writes: tuple[str, ...],
    *,
    derived_numbers: Callable[[Mapping[str, float]], list[float]] = lambda numbers: [],
    is_of_cpus: bool = False,
) -> None:
    """Add the operation `<family>_<suffix>` to the table, and give it to torch; `writes` names what it writes."""
    name = f"{family}_{suffix}"
    op = NATIVE_OPS[name] = NativeOp(family, check, compute, derived_numbers, is_of_cpus)
    torch.library.define(f"torchbagua::{name}", torch.library.infer_schema(compute, mutates_args=writes))
    # The fallback: torch takes it on every device for which no kernel of its own is registered.
    torch.library.impl(f"torchbagua::{name}", "CompositeExplicitAutograd", op.__call__)
    # Without it the plain torch would run on tensors that have no values.
    torch.library.register_fake(f"torchbagua::{name}", check)


# "default", "avx2" or "avx512": what the loaded CPU library uses. It has no kernel until a library is loaded.
torch.library.define("torchbagua::cpu_instruction_set", "() -> str")


def describe_tensor(tensor: Tensor) -> str:
    """Dtype, shape, device and, where it is not the usual, layout of `tensor`, for a message."""
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def refusal(operation: str, argument: str, allowed: str, got: object) -> ValueError:
    """The error for an argument."""
    return ValueError(f"torchbagua::{operation}: {argument} must be {allowed}, got {got}")


class TensorKind(NamedTuple):
    """What a tensor must be: one of the types, and the sizes. Last sizes with one name are equal within a call."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | str, ...]


# Of a row of a table: of any codec; and of a sparse one, which has how many elements are kept.
_BLOCK_FIELDS, _SPARSE_FIELDS = 4, 5

# What the arguments of operations are; what a table holds is not looked at.
ELEMENTS = TensorKind(ELEMENT_TYPES, ("N",))
FLOATS = TensorKind((torch.float32,), ("N",))
WIRE = TensorKind((torch.uint8,), ("W",))
ROWS = TensorKind((torch.uint8,), ("R", "W"))
TABLE = TensorKind((torch.int64,), ("B", _BLOCK_FIELDS))
SPARSE_TABLE = TensorKind((torch.int64,), ("B", _SPARSE_FIELDS))
DIVISOR = None  # a number, the only one there is


def check_arguments(name: str, kinds: Mapping[str, TensorKind | None], *arguments: Any, **by_name: Any) -> None:
    """Raise ValueError for the first argument of an operation that is not of its kind, on the device of the first.

    It runs before every launch of NVRTC's kernels, so what is right takes little time.

    Args:
        name: of the operation.
        kinds: of all its arguments, in their order; DIVISOR is that of a number.
        arguments, by_name: as it was called.
    """
    if by_name:
        given = {**dict(zip(kinds, arguments, strict=False)), **by_name}
        arguments = tuple(given[argument] for argument in kinds)
    device = arguments[0].device
    # The last sizes of the tensors before, by what their kinds call them; a number is called itself.
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
            raise refusal(name, argument, "of at least one row", describe_tensor(value))


def _tensor_refusal(
    name: str, argument: str, kind: TensorKind, sizes: Mapping[int | str, int], device: torch.device, tensor: Tensor
) -> ValueError:
    shape = ", ".join(str(sizes.get(size, size)) for size in kind.shape)
    return refusal(
        name, argument, f"contiguous {names_of(*kind.dtypes)} [{shape}] on {device}", describe_tensor(tensor)
    )


def names_of(*dtypes: torch.dtype) -> str:
    """As in "float32, bfloat16 or float16"."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
