"""What the compressors that code whole blocks with native kernels share."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from torchbagua import native
from torchbagua.compressors.blocks import WireLayout, lay_out, pad_row
from torchbagua.native.schema import CODECS, ELEMENT_TYPES

DEFAULT_BLOCK = 2048
_LARGEST_BLOCK = 2**30


def check_block(owner: str, block: int | None) -> None:
    """Raise TypeError or ValueError where `block` is not a block size; `owner` is the class that the error names."""
    if block is None:
        return
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"{owner}: block must be an int or None, got {block!r}")
    if not 8 <= block <= _LARGEST_BLOCK or block % 8:
        raise ValueError(f"{owner}: block must be None or a multiple of 8 from 8 to {_LARGEST_BLOCK}, got {block}")


@dataclass(frozen=True)
class BlockCodec:
    """A compressor with a header and a payload for each block; a subclass names its native operations.

    Args:
        block: elements that share a header, a multiple of 8; None gives a header per chunk.

    Raises:
        TypeError, ValueError: `block` is no such number.
    """

    operations: ClassVar[str]  # the beginning of their names, a key of CODECS

    block: int | None = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block)
        native.load()

    @property
    def granularity(self) -> int:
        """Elements of the blocks that chunks are made of."""
        return self.block or DEFAULT_BLOCK

    @property
    def in_place(self) -> bool:
        """False: the wire is smaller than the tensor."""
        return False

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is float32, bfloat16 or float16."""
        return dtype in ELEMENT_TYPES

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of one chunk: what headers and payloads take at most."""
        num_headers = num_blocks if self.block else min(num_blocks, 1)
        return pad_row(CODECS[self.operations].most_bytes(num_elements, num_headers))

    def layout(
        self, bounds_B: torch.Tensor, chunk_blocks: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> WireLayout:
        """Lay out chunks: in each row the headers, then the payloads."""
        plain = lay_out(
            bounds_B, chunk_blocks, lambda length, blocks: self.wire_bytes(length, blocks, dtype), dtype, device
        )
        block_format = CODECS[self.operations]
        tables, block_cuts = [], [0]
        for row, (first, last) in zip(plain.rows, itertools.pairwise(chunk_blocks), strict=True):
            bounds = bounds_B[first : last + 1] if self.block else bounds_B[[first, last]].unique()
            starts, lengths = bounds[:-1], bounds.diff()
            headers = row.start + block_format.header_bytes * torch.arange(len(starts))
            payload_bytes = block_format.payload_bytes(lengths)
            payloads = row.start + block_format.header_bytes * len(starts) + payload_bytes.cumsum(0) - payload_bytes
            tables.append(torch.stack([starts, lengths, headers, payloads], dim=1))
            block_cuts.append(block_cuts[-1] + len(starts))
        return replace(plain, table=torch.cat(tables).to(device), chunk_blocks=tuple(block_cuts))

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Read `x_N`, write headers and payloads of all chunks into `wire_W`."""
        self._operation("encode")(x_N, layout.table, wire_W)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Read `wire_W`, write `x_N`, computed in float32 and rounded to its dtype."""
        self._operation("decode")(wire_W, layout.table, x_N)

    def decode_mean(self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Decode R wires of one chunk, add in float32 in row order, divide by `divisor`, write `x_N`, float32."""
        self._operation("decode_mean")(rows_RW, layout.table, divisor, x_N)

    def decode_mean_encode(
        self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Decode R wires of one chunk, add in float32 in row order, divide by `divisor`, encode into `wire_W`."""
        self._operation("decode_mean_encode")(rows_RW, layout.table, divisor, wire_W)

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        """Encode `x_N + residual_N`, and write what the wire leaves out of that to `left_out_N`."""
        self._operation("encode_feedback")(x_N, residual_N, layout.table, wire_W, left_out_N)

    def _operation(self, name: str) -> Callable[..., None]:
        operation: Callable[..., None] = getattr(torch.ops.torchbagua, f"{self.operations}_{name}")
        return operation
