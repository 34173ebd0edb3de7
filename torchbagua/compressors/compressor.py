"""The interface of a compressor: tensor -> bytes -> tensor."""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchbagua.compressors.blocks import WireLayout


class Compressor(Protocol):
    """Turns a flat tensor into wire bytes and back. Deterministic, without state, group or hidden randomness.

    A *wire* is a contiguous uint8 tensor, laid out by `layout`; what it decodes to does not depend on how blocks are
    dealt to chunks. All methods write into memory that is handed to them and may hold anything: what a codec does not
    write it must not read.
    """

    @property
    def granularity(self) -> int:
        """Elements of the blocks that chunks are made of; no block crosses a parameter's boundary."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the wire is the tensor's own bytes, so that a view of the tensor can serve as its wire."""
        ...

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of `dtype` can be encoded."""
        ...

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of the wire of one chunk."""
        ...

    def layout(
        self, bounds_B: torch.Tensor, chunk_blocks: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> WireLayout:
        """Lay out chunks (see `block_bounds` and `deal_blocks`) of a tensor of `dtype` on `device`."""
        ...

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Read `x_N`, write `wire_W`."""
        ...

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Read `wire_W`, write `x_N`, rounding to its dtype."""
        ...

    def decode_mean(self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Decode R wires of one chunk, add them in float32 in row order, divide by `divisor`, write `x_N`, float32."""
        ...

    def decode_mean_encode(
        self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Decode R wires of one chunk, add them in row order, divide by `divisor`, encode into `wire_W`.

        Sums are formed in float32, of float64 in float64. What `rows_RW` holds afterwards is not defined.
        """
        ...

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        """Encode `x_N + residual_N`, and write what the wire leaves out of that to `left_out_N`; all are float32.

        What `x_N` holds afterwards is not defined.
        """
        ...
