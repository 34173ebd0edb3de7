"""Codecs that encode whole blocks, each with a header and a payload, and codecs with native kernels."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from torchbagua import native
from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor, WireLayout, pad_bytes
from torchbagua.native.block_format import CODECS

_LARGEST_BLOCK = 2**30


def check_block(owner: str, block: int | None) -> None:
    """Raise TypeError or ValueError if `block` is not a valid block size. The error names the class `owner`."""
    if block is None:
        return
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"{owner}: block must be an int or None, got {block!r}")
    if not 8 <= block <= _LARGEST_BLOCK or block % 8:
        raise ValueError(f"{owner}: block must be None or a multiple of 8 from 8 to {_LARGEST_BLOCK}, got {block}")


class BlockBytes(Protocol):
    """The sizes of a block's header and payload on the wire of a codec."""

    @property
    def header_bytes(self) -> int:
        """The size of a block's header."""
        ...

    def payload_bytes(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the payload sizes of blocks with `lengths` elements."""
        ...

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        """Return the largest total size of the headers and payloads of `num_blocks` blocks with `num_elements` in all.

        The message for a chunk has this size, rounded up.
        """
        ...


@dataclass(frozen=True)
class BlockCodec(Compressor):
    """A codec with a header and a payload for each block. In each chunk all headers come first, then all payloads.

    A subclass returns the sizes of headers and payloads from `block_format`, and implements `encode` and `decode`,
    which find headers and payloads by `WireLayout.table`.

    Args:
        block: the number of elements that share a header, a multiple of 8. None gives one header for each chunk.

    Raises:
        TypeError, ValueError: `block` is not a valid block size.
    """

    block: int | None = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block)

    @property
    @abstractmethod
    def block_format(self) -> BlockBytes:
        """The sizes of a block's header and payload on the wire."""

    @property
    def block_elements(self) -> int:
        return self.block or DEFAULT_BLOCK

    @property
    def blocks_are_independent(self) -> bool:
        return self.block is not None

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the size of one chunk in bytes: the largest size of its headers and payloads."""
        num_headers = num_blocks if self.block else min(num_blocks, 1)
        return pad_bytes(self.block_format.most_bytes(num_elements, num_headers))

    def block_table(self, bounds_B: torch.Tensor, first_byte: int) -> torch.Tensor:
        bounds = bounds_B if self.block else bounds_B[[0, -1]].unique()
        starts, lengths = bounds[:-1], bounds.diff()
        header_bytes = self.block_format.header_bytes
        headers = first_byte + header_bytes * torch.arange(len(starts))
        payload_bytes = self.block_format.payload_bytes(lengths)
        payloads = first_byte + header_bytes * len(starts) + payload_bytes.cumsum(0) - payload_bytes
        needed, num_elements = header_bytes * len(starts) + int(payload_bytes.sum()), int(lengths.sum())
        most = self.block_format.most_bytes(num_elements, len(starts))
        if needed > most:
            raise ValueError(
                f"{type(self).__name__}: block_format.most_bytes must be at least the size of all headers and "
                f"payloads, got {most}, but {len(starts)} blocks with {num_elements} elements in all take {needed} "
                "bytes; return a larger bound"
            )
        return torch.stack([starts, lengths, headers, payloads], dim=1)


@dataclass(frozen=True)
class NativeBlockCodec(BlockCodec):
    """A block codec with native operations. A subclass sets `op_prefix`, the prefix of their names.

    For `op_prefix` "minmax_uint8", a key of CODECS, the operations are torchbagua::minmax_uint8_encode,
    minmax_uint8_decode, minmax_uint8_decode_mean, minmax_uint8_decode_mean_encode, minmax_uint8_encode_feedback and,
    for CPUs, minmax_uint8_decode_mean_encode_feedback.
    """

    op_prefix: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        native.load()

    @property
    def block_format(self) -> BlockBytes:
        return CODECS[self.op_prefix]

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        self.native_op("encode")(x_N, layout.table, wire_W)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        self.native_op("decode")(wire_W, layout.table, x_N)

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        self.native_op("decode_mean")(wires_RW, layout.table, divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        self.native_op("decode_mean_encode")(wires_RW, layout.table, divisor, wire_W)

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        self.native_op("encode_feedback")(x_N, residual_N, layout.table, wire_W, left_out_N)

    def decode_mean_encode_feedback(
        self,
        wires_RW: torch.Tensor,
        layout: WireLayout,
        divisor: float,
        residual_N: torch.Tensor,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
        memory_N: torch.Tensor,
    ) -> None:
        if wire_W.is_cuda:
            super().decode_mean_encode_feedback(wires_RW, layout, divisor, residual_N, wire_W, left_out_N, memory_N)
            return
        op = self.native_op("decode_mean_encode_feedback")
        op(wires_RW, layout.table, divisor, residual_N, wire_W, left_out_N)

    def native_op(self, name: str) -> Callable[..., None]:
        """Return the native operation `name` of this codec, for example "encode"."""
        op: Callable[..., None] = getattr(torch.ops.torchbagua, f"{self.op_prefix}_{name}")
        return op
