"""Compressors that only change the number format: Identity and Cast."""

from dataclasses import dataclass

import torch

from torchbagua.compressors.base import Compressor, divide, register_compressor, sum_dtype
from torchbagua.compressors.blocks import WireLayout, pad_bytes

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Identity(Compressor):
    """Full precision: the wire is the bytes of the tensor itself, in its memory."""

    @property
    def wire_is_tensor(self) -> bool:
        return True

    @property
    def codes_blocks(self) -> bool:
        return False

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is floating-point, and real: complex numbers are pairs of these."""
        return dtype.is_floating_point

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return num_elements * dtype.itemsize

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        if wire_W.data_ptr() != x_N.data_ptr():  # else they are the same memory
            typed(wire_W, layout.dtype).copy_(x_N)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        if wire_W.data_ptr() != x_N.data_ptr():
            x_N.copy_(typed(wire_W, layout.dtype))

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        divide(sum_of_rows(typed(wires_RW, layout.dtype)), divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        self.decode_mean(wires_RW, layout, divisor, typed(wire_W, layout.dtype))

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        """Encode `x_N + residual_N`, of which the wire leaves nothing out."""
        self.encode(x_N.add_(residual_N), layout, wire_W)
        left_out_N.zero_()


@dataclass(frozen=True)
class Cast(Compressor):
    """16 bits an element, rounded to nearest: bfloat16, or float16, which overflows beyond 65504.

    Args:
        dtype: "bfloat16" or "float16".

    Raises:
        ValueError: any other dtype.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"Cast: dtype must be one of {sorted(_DTYPES)}, got {self.dtype!r}")

    @property
    def codes_blocks(self) -> bool:
        return False

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return pad_bytes(2 * num_elements)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        for elements, own_bytes in zip(layout.elements, layout.byte_slices, strict=True):
            chunk_L = x_N[elements]
            typed(wire_W[own_bytes], _DTYPES[self.dtype])[: len(chunk_L)].copy_(chunk_L)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        for elements, own_bytes in zip(layout.elements, layout.byte_slices, strict=True):
            chunk_L = x_N[elements]
            chunk_L.copy_(typed(wire_W[own_bytes], _DTYPES[self.dtype])[: len(chunk_L)])

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        divide(sum_of_rows(typed(wires_RW, _DTYPES[self.dtype])[:, : x_N.numel()]), divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        self.decode_mean(wires_RW, layout, divisor, typed(wire_W, _DTYPES[self.dtype])[: layout.elements[0].stop])


def typed(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as the elements of `dtype` that they are."""
    # Of empty wires, [R, 0], each begins one byte behind the other, where `view` finds no place for an element.
    return wire.view(dtype) if wire.numel() else wire.new_empty(wire.shape, dtype=dtype)


def sum_of_rows(rows_RL: torch.Tensor) -> torch.Tensor:
    """Return the sum of rows in their `sum_dtype`, added in the order of the rows; it may use their memory."""
    total_L = rows_RL[0].to(sum_dtype(rows_RL.dtype))
    for row_L in rows_RL[1:]:
        total_L.add_(row_L)
    return total_L


for _dtype in _DTYPES:
    register_compressor(_dtype, lambda dtype=_dtype: Cast(dtype))
