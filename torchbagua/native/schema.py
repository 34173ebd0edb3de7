"""The native operations: schemas, what they refuse, and fakes. Kernels: reference.py and csrc_cuda.

A *block table* is an int64 tensor [B, 4] on the device of the data, one row for each block: `start`, the offset of the
block in x in elements; `length`, its elements, at least 1; `header`, the offset in the wire of its header bytes, a
multiple of 4; `payload`, the offset in the wire of its payload bytes; CODECS has how many they are. What the blocks of
one table write must not overlap, nor may a tensor that is written overlap one that is read: the result would depend on
the kernel.

An operation that refuses its arguments raises ValueError and has written nothing.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
UNUSABLE_MAGNITUDE = 0x7E800000  # bits of 2^126: no codec takes a magnitude from there on


class BlockFormat(NamedTuple):
    """The bytes of a block in the wire of one codec."""

    header_bytes: int
    elements_per_byte: int

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        """The payload bytes of blocks of `lengths` elements: whole ones."""
        return -(-lengths // self.elements_per_byte)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        """The most that headers and payloads of `num_blocks` blocks with `num_elements` elements in all can take."""
        most_per_block = self.elements_per_byte - 1
        return self.header_bytes * num_blocks + (num_elements + most_per_block * num_blocks) // self.elements_per_byte


# The codecs by the beginning of their operations' names. Of each there are `_encode`, `_decode`, `_decode_mean`,
# `_decode_mean_encode` and `_encode_feedback`.
CODECS = {
    "minmax_uint8": BlockFormat(header_bytes=8, elements_per_byte=1),  # minimum, maximum; a byte an element
    "sign_1bit": BlockFormat(header_bytes=4, elements_per_byte=8),  # scale; a bit an element
}


def _describe(tensor: Tensor) -> str:
    """Dtype, shape, device and, where it is not the usual, layout of `tensor`, for a message."""
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def refusal(operation: str, argument: str, allowed: str, got: object) -> ValueError:
    """The error for an argument; the CPU library words it in the same way."""
    return ValueError(f"torchbagua::{operation}: {argument} must be {allowed}, got {got}")


def check_bytes(operation: str, argument: str, tensor: Tensor, num_dims: int) -> None:
    """Raise ValueError unless `tensor` is contiguous uint8 with `num_dims` dimensions."""
    if tensor.dim() != num_dims or not tensor.is_contiguous() or tensor.dtype != torch.uint8:
        raise refusal(
            operation, argument, f"contiguous uint8 {'[W]' if num_dims == 1 else '[R, W]'}", _describe(tensor)
        )


def check_table_tensor(operation: str, table: Tensor) -> None:
    """Raise ValueError unless `table` has the type and shape of a block table; its content is not looked at."""
    if table.dim() != 2 or not table.is_contiguous() or table.dtype != torch.int64 or table.shape[1] != 4:
        raise refusal(operation, "table", "contiguous int64 [B, 4]", _describe(table))


def check_device(operation: str, argument: str, tensor: Tensor, first: Tensor) -> None:
    """Raise ValueError unless `tensor` is where the operation's first argument is."""
    if tensor.device != first.device:
        raise refusal(operation, argument, f"on {first.device}", _describe(tensor))


def check_codec(operation: str, x: Tensor, table: Tensor, wire: Tensor) -> None:
    """Raise ValueError for arguments that `encode` and `decode` of a codec refuse by their type."""
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in ELEMENT_TYPES:
        raise refusal(operation, "x", "contiguous float32, bfloat16 or float16 [N]", _describe(x))
    check_bytes(operation, "wire", wire, 1)
    check_table_tensor(operation, table)
    check_device(operation, "wire", wire, x)
    check_device(operation, "table", table, x)


def check_senders(operation: str, rows: Tensor, table: Tensor, divisor: float) -> None:
    """Raise ValueError for arguments that the means of a codec refuse by their type or value."""
    check_bytes(operation, "rows", rows, 2)
    if rows.shape[0] < 1:
        raise refusal(operation, "rows", "of at least one row", _describe(rows))
    if not 0 < ctypes.c_float(divisor).value < math.inf:
        raise refusal(operation, "divisor", "a positive finite float32", divisor)
    check_table_tensor(operation, table)
    check_device(operation, "table", table, rows)


def check_mean_encode(operation: str, rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
    """Raise ValueError for arguments that `decode_mean_encode` of a codec refuses by their type or value."""
    check_senders(operation, rows, table, divisor)
    check_bytes(operation, "wire", wire, 1)
    if wire.shape[0] != rows.shape[1]:
        raise refusal(operation, "wire", f"as long as a row, {rows.shape[1]} bytes", _describe(wire))
    check_device(operation, "wire", wire, rows)


def check_mean(operation: str, rows: Tensor, table: Tensor, divisor: float, x: Tensor) -> None:
    """Raise ValueError for arguments that `decode_mean` of a codec refuses by their type or value."""
    check_senders(operation, rows, table, divisor)
    check_floats(operation, "x", x)
    check_device(operation, "x", x, rows)


def check_floats(operation: str, argument: str, tensor: Tensor, num_elements: int | None = None) -> None:
    """Raise ValueError unless `tensor` is contiguous float32 with one dimension, as long as given where it is."""
    length = tensor.numel() if num_elements is None else num_elements
    if tensor.shape != (length,) or not tensor.is_contiguous() or tensor.dtype != torch.float32:
        allowed = f"contiguous float32 [{'N' if num_elements is None else num_elements}]"
        raise refusal(operation, argument, allowed, _describe(tensor))


def check_feedback(operation: str, x: Tensor, residual: Tensor, table: Tensor, wire: Tensor, left_out: Tensor) -> None:
    """Raise ValueError for arguments that `encode_feedback` of a codec refuses by their type."""
    check_floats(operation, "x", x)
    check_floats(operation, "residual", residual, x.numel())
    check_floats(operation, "left_out", left_out, x.numel())
    check_bytes(operation, "wire", wire, 1)
    check_table_tensor(operation, table)
    for argument, tensor in {"residual": residual, "left_out": left_out, "wire": wire, "table": table}.items():
        check_device(operation, argument, tensor, x)


def check_forms(operation: str, values_name: str, values: list[Tensor], momenta: list[Tensor]) -> None:
    """Raise ValueError for arguments that `qadam_form_momenta` and `qadam_form_gradients` refuse."""
    if len(momenta) != len(values):
        raise refusal(operation, "momenta", f"a list of {len(values)} tensors", f"a list of {len(momenta)}")
    for value, momentum in zip(values, momenta, strict=True):
        check_floats(operation, values_name, value)
        if momentum.shape != value.shape or not momentum.is_contiguous() or momentum.dtype not in ELEMENT_TYPES:
            allowed = f"contiguous float32, bfloat16 or float16 [{value.numel()}]"
            raise refusal(operation, "momenta", allowed, _describe(momentum))
        check_device(operation, "momenta", momentum, value)


def check_qadam(weights: list[Tensor], **others: list[Tensor]) -> None:
    """Raise ValueError for arguments that `qadam_update` refuses; `others` by name."""
    operation = "qadam_update"
    for name, tensors in others.items():
        if len(tensors) != len(weights):
            raise refusal(operation, name, f"a list of {len(weights)} tensors", f"a list of {len(tensors)}")
        for tensor, weight in zip(tensors, weights, strict=True):
            kinds = [(one.shape, one.dtype, one.device) for one in (tensor, weight)]
            if not tensor.is_contiguous() or kinds[0] != kinds[1]:
                raise refusal(operation, name, f"like weights, {_describe(weight)}", _describe(tensor))
    for weight in weights:
        if not weight.is_contiguous() or weight.dtype not in ELEMENT_TYPES:
            raise refusal(operation, "weights", "contiguous float32, bfloat16 or float16", _describe(weight))


# x: [N] float32, bfloat16 or float16; wire: [W] uint8; rows: [R, W], one wire of each sender.
#
# encode reads x, writes the header and the payload of every block; other bytes of the wire stay as they are.
#
# decode reads the wire, writes x: float32 arithmetic, rounded to the type of x at the end. A block whose header no
# encoder writes becomes NaN.
#
# decode_mean, for every block: decode the R rows in float32, add them in the order of the rows, divide by `divisor` in
# float32, into x, which is float32. decode_mean_encode encodes that into `wire`; it does not use a block's `start`.
#
# encode_feedback, for float32: encodes x + residual, and writes what the wire leaves out of that, the sum minus what is
# decoded, to left_out [N], where there are blocks.
#
# MinMaxUInt8 (algorithms.md, "MinMaxUInt8") has minimum and maximum in its header, and no encoder writes one that is
# not finite, 2^126 or more in magnitude, or has its minimum above its maximum.
#
# Sign1Bit has the mean magnitude in its header, which no encoder writes unless it is finite, below 2^126 and without
# a sign bit. Bit i % 8 of payload byte i // 8 is the sign bit of element i; bits past the last element are written 0.
# element/sign_1bit.h has the order in which magnitudes are added.
for _codec in CODECS:
    torch.library.define(f"torchbagua::{_codec}_encode", "(Tensor x, Tensor table, Tensor(a!) wire) -> ()")
    torch.library.define(f"torchbagua::{_codec}_decode", "(Tensor wire, Tensor table, Tensor(a!) x) -> ()")
    torch.library.define(
        f"torchbagua::{_codec}_decode_mean", "(Tensor rows, Tensor table, float divisor, Tensor(a!) x) -> ()"
    )
    torch.library.define(
        f"torchbagua::{_codec}_decode_mean_encode",
        "(Tensor rows, Tensor table, float divisor, Tensor(a!) wire) -> ()",
    )
    torch.library.define(
        f"torchbagua::{_codec}_encode_feedback",
        "(Tensor x, Tensor residual, Tensor table, Tensor(a!) wire, Tensor(b!) left_out) -> ()",
    )

# QAdam after its warm-up (algorithms.md, "QAdam"), for each of several parameters, of any shape; arithmetic in float32.
# With w = weight * shrink and g = gradient * gradient_sign + weight_decay * w, in this order:
#   momentum = beta1 * momentum + (1 - beta1) * g
#   ratio = momentum / (sqrt(second_moment) / root_correction2 + eps), clamped to +- largest_ratio;
#   weight = w - step_size * ratio, or w where second_moment is 0.
torch.library.define(
    "torchbagua::qadam_update",
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor[] second_moments, *, float gradient_sign, "
    "float weight_decay, float shrink, float beta1, float root_correction2, float eps, "
    "float largest_ratio, float step_size) -> ()",
)

# What travels, and what is left for the optimizer, both in place, for each of several parameters [N]:
#   gradients = gradients * share + momenta * beta1, where share is (1 - beta1) / loss scale;
#   averages = (averages - momenta * beta1) / share.
torch.library.define(
    "torchbagua::qadam_form_momenta", "(Tensor(a!)[] gradients, Tensor[] momenta, *, float beta1, float share) -> ()"
)
torch.library.define(
    "torchbagua::qadam_form_gradients", "(Tensor(a!)[] averages, Tensor[] momenta, *, float beta1, float share) -> ()"
)

# "default", "avx2" or "avx512": what the loaded CPU library uses. It has no kernel until a library is loaded.
torch.library.define("torchbagua::cpu_instruction_set", "() -> str")


def _register_codec_fakes(codec: str) -> None:
    def encode(x: Tensor, table: Tensor, wire: Tensor) -> None:
        check_codec(f"{codec}_encode", x, table, wire)

    def decode(wire: Tensor, table: Tensor, x: Tensor) -> None:
        check_codec(f"{codec}_decode", x, table, wire)

    def decode_mean(rows: Tensor, table: Tensor, divisor: float, x: Tensor) -> None:
        check_mean(f"{codec}_decode_mean", rows, table, divisor, x)

    def decode_mean_encode(rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
        check_mean_encode(f"{codec}_decode_mean_encode", rows, table, divisor, wire)

    def encode_feedback(x: Tensor, residual: Tensor, table: Tensor, wire: Tensor, left_out: Tensor) -> None:
        check_feedback(f"{codec}_encode_feedback", x, residual, table, wire, left_out)

    for fake in (encode, decode, decode_mean, decode_mean_encode, encode_feedback):
        torch.library.register_fake(f"torchbagua::{codec}_{fake.__name__}", fake)


def _qadam_fake(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    **numbers: float,
) -> None:
    check_qadam(weights, gradients=gradients, momenta=momenta, second_moments=second_moments)


def _form_momenta_fake(gradients: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    check_forms("qadam_form_momenta", "gradients", gradients, momenta)


def _form_gradients_fake(averages: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    check_forms("qadam_form_gradients", "averages", averages, momenta)


torch.library.register_fake("torchbagua::qadam_update", _qadam_fake)
torch.library.register_fake("torchbagua::qadam_form_momenta", _form_momenta_fake)
torch.library.register_fake("torchbagua::qadam_form_gradients", _form_gradients_fake)
for _codec in CODECS:
    _register_codec_fakes(_codec)
