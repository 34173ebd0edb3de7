"""Cast: the codec that sends a shorter number format."""

from dataclasses import dataclass

import torch

from torchbagua.codecs.base import Compressor, WireLayout, mean_of_rows, pad_bytes, register_compressor, typed

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


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


for _dtype in _DTYPES:
    register_compressor(_dtype, lambda dtype=_dtype: Cast(dtype))
