"""Codecs that only change the number format: Identity and Cast."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbagua.codecs.base import Compressor, WireLayout, divide, pad_bytes, register_compressor, sum_dtype

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# Elements per thread: 256 KiB of sums.
_ELEMENTS_PER_THREAD = 1 << 16


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
        """Return whether `dtype` is floating-point and real. Complex numbers are encoded as pairs of real numbers."""
        return dtype.is_floating_point

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return num_elements * dtype.itemsize

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        if wire_W.data_ptr() != x_N.data_ptr():  # otherwise the two share memory
            typed(wire_W, layout.dtype).copy_(x_N)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        if wire_W.data_ptr() != x_N.data_ptr():
            x_N.copy_(typed(wire_W, layout.dtype))

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        mean_of_rows([typed(wire_W, layout.dtype) for wire_W in wires_RW], divisor, x_N)

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
        """Encode `x_N + residual_N` exactly, and write a residual of zero."""
        self.encode(x_N.add_(residual_N), layout, wire_W)
        left_out_N.zero_()


@dataclass(frozen=True)
class Cast(Compressor):
    """Sends 16 bits per element, rounded to nearest: bfloat16, or float16, which overflows beyond 65504.

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
        mean_of_rows(list(typed(wires_RW, _DTYPES[self.dtype])[:, : x_N.numel()]), divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        self.decode_mean(wires_RW, layout, divisor, typed(wire_W, _DTYPES[self.dtype])[: layout.elements[0].stop])


def typed(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of bytes as elements of `dtype`."""
    # Empty wires, [R, 0], have a stride of one byte, which `view` rejects for larger elements.
    return wire.view(dtype) if wire.numel() else wire.new_empty(wire.shape, dtype=dtype)


def mean_of_rows(rows: Sequence[torch.Tensor], divisor: float, out_L: torch.Tensor) -> None:
    """Sum the rows in order, in their `sum_dtype`, divide by `divisor`, and write the result to `out_L`.

    `out_L` may be one of the rows.
    """
    dtype = sum_dtype(rows[0].dtype)
    if len(rows) == 2 and rows[0].dtype == out_L.dtype == dtype:
        torch.add(rows[0], rows[1], out=out_L)
        if divisor != 1:  # sums within nodes have a divisor of 1
            divide(out_L, divisor, out_L)
        return
    # Sum part by part: the sums stay in the cache, and need no memory of the full length.
    length = len(out_L) if out_L.is_cuda else min(len(out_L), _ELEMENTS_PER_THREAD * torch.get_num_threads())
    sums = out_L.new_empty(length, dtype=dtype)
    for out_P, first_P, *rest in zip(*(tensor.split(max(length, 1)) for tensor in (out_L, *rows)), strict=True):
        sum_P = sums[: len(out_P)]
        if rest and first_P.dtype == dtype:
            torch.add(first_P, rest.pop(0), out=sum_P)
        else:
            sum_P.copy_(first_P)
        for row_P in rest:
            sum_P.add_(row_P)
        divide(sum_P, divisor, out_P)


for _dtype in _DTYPES:
    register_compressor(_dtype, lambda dtype=_dtype: Cast(dtype))
