"""Compressors that only change the number format: Identity and Cast."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbagua.compressors.blocks import WireLayout, lay_out, pad_row
from torchbagua.native.schema import ELEMENT_TYPES

_GRANULARITY = 2048
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Identity:
    """Full precision: the wire is the tensor's own bytes, in its own memory."""

    @property
    def granularity(self) -> int:
        """Elements of the blocks that chunks are made of."""
        return _GRANULARITY

    @property
    def in_place(self) -> bool:
        """True."""
        return True

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is floating-point, and real: complex numbers are pairs of these."""
        return dtype.is_floating_point

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of one chunk."""
        return num_elements * dtype.itemsize

    def layout(
        self, bounds_B: torch.Tensor, chunk_blocks: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> WireLayout:
        """Lay out chunks: rows lie where the elements lie."""
        return lay_out(bounds_B, chunk_blocks, lambda length, _: self.wire_bytes(length, 0, dtype), dtype, device)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Read `x_N`, write `wire_W`; nothing to do where they are the same memory."""
        if wire_W.data_ptr() != x_N.data_ptr():
            wire_W.copy_(x_N.view(torch.uint8))

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Read `wire_W`, write `x_N`; nothing to do where they are the same memory."""
        if wire_W.data_ptr() != x_N.data_ptr():
            x_N.copy_(wire_W.view(x_N.dtype))

    def decode_mean(self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Add R rows in float32 in row order, divide by `divisor`, write `x_N`, float32."""
        _mean_of_rows(rows_RW.view(layout.dtype), divisor, x_N)

    def decode_mean_encode(
        self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Add R rows in row order, in float32 or float64, divide by `divisor`, write `wire_W`."""
        _mean_of_rows(rows_RW.view(layout.dtype), divisor, wire_W.view(layout.dtype))

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
class Cast:
    """Sixteen bits an element: rounded to nearest in bfloat16 or float16 (which overflows beyond 65504).

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
    def granularity(self) -> int:
        """Elements of the blocks that chunks are made of."""
        return _GRANULARITY

    @property
    def in_place(self) -> bool:
        """False: the wire has another number format."""
        return False

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is float32, bfloat16 or float16."""
        return dtype in ELEMENT_TYPES

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of one chunk."""
        return pad_row(2 * num_elements)

    def layout(
        self, bounds_B: torch.Tensor, chunk_blocks: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> WireLayout:
        """Lay out chunks: one row each."""
        return lay_out(bounds_B, chunk_blocks, lambda length, _: self.wire_bytes(length, 0, dtype), dtype, device)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Read `x_N`, write `wire_W`, rounding to nearest even."""
        for elements, row in zip(layout.elements, layout.rows, strict=True):
            chunk_L = x_N[elements]
            self._typed(wire_W[row])[: len(chunk_L)].copy_(chunk_L)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Read `wire_W`, write `x_N`."""
        for elements, row in zip(layout.elements, layout.rows, strict=True):
            chunk_L = x_N[elements]
            chunk_L.copy_(self._typed(wire_W[row])[: len(chunk_L)])

    def decode_mean(self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Add R rows in float32 in row order, divide by `divisor`, write `x_N`, float32."""
        _mean_of_rows(self._typed(rows_RW)[:, : x_N.numel()], divisor, x_N)

    def decode_mean_encode(
        self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Add R rows in float32 in row order, divide by `divisor`, round into `wire_W`."""
        _mean_of_rows(self._typed(rows_RW), divisor, self._typed(wire_W))

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        """Encode `x_N + residual_N`, and write what rounding takes from that to `left_out_N`."""
        self.encode(x_N.add_(residual_N), layout, wire_W)
        self.decode(wire_W, layout, left_out_N)
        torch.sub(x_N, left_out_N, out=left_out_N)

    def _typed(self, wire: torch.Tensor) -> torch.Tensor:
        dtype = _DTYPES[self.dtype]
        # In a table of empty rows each lies one byte behind the other, where there may be no place for 16 bits.
        return wire.view(dtype) if wire.numel() else wire.new_empty(wire.shape, dtype=dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what values of `dtype` are added in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_of_rows(rows_RL: torch.Tensor) -> torch.Tensor:
    """Return the sum of rows in their `sum_dtype`, added in row order; it may use their memory."""
    total_L = rows_RL[0].to(sum_dtype(rows_RL.dtype))
    for row_L in rows_RL[1:]:
        total_L.add_(row_L)
    return total_L


def _mean_of_rows(rows_RL: torch.Tensor, divisor: float, out_L: torch.Tensor) -> None:
    """Write the sum of rows, divided by `divisor` in its dtype, to `out_L`."""
    total_L = sum_of_rows(rows_RL)
    # By a tensor on the device: on CUDA, division by a Python number is a multiplication by its reciprocal.
    torch.div(total_L, torch.full((1,), divisor, dtype=total_L.dtype, device=total_L.device), out=out_L)
