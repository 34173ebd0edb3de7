"""The interface of a compressor, tensor -> bytes -> tensor, and the registry of names."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from torchbagua.codecs.blocks import TensorSpec, WireLayout, blocks_of_chunks
from torchbagua.native.ops import ELEMENT_TYPES

DEFAULT_BLOCK = 2048


class Compressor(ABC):
    """Turns a flat tensor into bytes and back: a codec. It keeps no state, sends nothing, and is deterministic.

    A *wire* is a contiguous uint8 tensor, which `layout` lays out. What it decodes to does not depend on how blocks are
    assigned to chunks, unless a codec has `block=None`. All methods write into memory that they are given. It may hold
    anything before, so do not read what you have not written.

    A subclass is a frozen dataclass and implements `wire_bytes`, `encode` and `decode`. The other methods follow from
    these. Override them if there is a faster way, with the same bits. For a codec that works block by block, with a
    header and a payload for each, subclass `BlockCodec`.

    Attributes:
        needs_feedback: whether it leaves so much out that training fails where that is lost. Algorithms then take it
            with error feedback alone.
    """

    needs_feedback: ClassVar[bool] = False

    @property
    def block_elements(self) -> int:
        """How many elements a block has. Chunks consist of blocks, and no block crosses a parameter's boundary."""
        return DEFAULT_BLOCK

    @property
    def wire_is_tensor(self) -> bool:
        """Whether the wire is the bytes of the tensor itself, so that a view of the tensor can be sent.

        `decode_mean` and `decode_mean_encode` may then be given a list of R wires, of which one is such a view.
        """
        return False

    @property
    def codes_blocks(self) -> bool:
        """Whether blocks are encoded as a whole, so that a chunk must begin where a block begins."""
        return True

    @property
    def codes_blocks_alone(self) -> bool:
        """Whether a block is coded by itself, so that a chunk may be coded in pieces."""
        return True

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of `dtype` can be encoded: float32, bfloat16 and float16 by default."""
        return dtype in ELEMENT_TYPES

    @abstractmethod
    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return how many bytes the wire of one chunk takes, whatever its values.

        It is a multiple of 32, unless the wire is the tensor itself.
        """

    def layout(self, spec: TensorSpec, cuts: Sequence[int], *, equal_bytes: bool = False) -> WireLayout:
        """Lay out the wire of a tensor in chunks, with `wire_bytes` for each.

        Args:
            spec: the description of the tensor.
            cuts: at which elements chunks begin and end, see `TensorSpec.even_cuts`.
            equal_bytes: give each chunk as many bytes as the longest one has.

        Raises:
            ValueError: a cut does not lie between two blocks.
        """
        bounds_B = spec.block_bounds(self.block_elements)
        chunk_blocks = blocks_of_chunks(bounds_B, cuts, spec.name, are_whole=self.codes_blocks)
        elements = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
        num_bytes = [
            self.wire_bytes(chunk.stop - chunk.start, last - first, spec.dtype)
            for chunk, (first, last) in zip(elements, itertools.pairwise(chunk_blocks), strict=True)
        ]
        if equal_bytes:
            num_bytes = [max(num_bytes)] * len(num_bytes)
        ends = list(itertools.accumulate(num_bytes, initial=0))
        byte_slices = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        tables = [
            self.block_table(bounds_B[first : last + 1], chunk_bytes.start)
            for chunk_bytes, (first, last) in zip(byte_slices, itertools.pairwise(chunk_blocks), strict=True)
        ]
        return WireLayout(
            dtype=spec.dtype,
            elements=tuple(elements),
            byte_slices=tuple(byte_slices),
            table=torch.cat(tables).to(spec.device),
            chunk_blocks=tuple(itertools.accumulate(map(len, tables), initial=0)),
        )

    def block_table(self, bounds_B: torch.Tensor, first_byte: int) -> torch.Tensor:
        """Return the rows of `WireLayout.table` for a chunk with these blocks, whose bytes begin at `first_byte`."""
        return torch.zeros(0, 4, dtype=torch.int64)

    @abstractmethod
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Encode the elements `x_N` into the bytes `wire_W`."""

    @abstractmethod
    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Decode the bytes `wire_W` into `x_N`, which has any floating-point dtype, and round to it."""

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Decode R wires of one chunk, add them in rank order, divide by `divisor`, and write the result to `x_N`.

        Sums are formed in the dtype of `x_N`: float32, or float64 for float64.
        """
        self.decode(wires_RW[0], layout, x_N)
        one_N = torch.empty_like(x_N)
        for wire_W in wires_RW[1:]:
            self.decode(wire_W, layout, one_N)
            x_N.add_(one_N)
        divide(x_N, divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Encode the result of `decode_mean` into `wire_W`. It may change `wires_RW`."""
        mean_N = torch.empty(layout.elements[0].stop, dtype=sum_dtype(layout.dtype), device=wire_W.device)
        self.decode_mean(wires_RW, layout, divisor, mean_N)
        self.encode(mean_N, layout, wire_W)

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        """Encode `x_N + residual_N`, and write what the wire leaves out of it to `left_out_N`. All are float32.

        It may change `x_N`.
        """
        self.encode(x_N.add_(residual_N), layout, wire_W)
        self.decode(wire_W, layout, left_out_N)
        torch.sub(x_N, left_out_N, out=left_out_N)

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
        """Encode the result of `decode_mean`, float32, as `encode_feedback` does. `memory_N` is memory for it."""
        self.decode_mean(wires_RW, layout, divisor, memory_N)
        self.encode_feedback(memory_N, residual_N, layout, wire_W, left_out_N)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are added: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def divide(x_N: torch.Tensor, divisor: float, out_N: torch.Tensor) -> None:
    """Write `x_N` divided by `divisor`, in the dtype of sums, to `out_N`, which may be of another."""
    if math.frexp(divisor)[0] == 0.5:  # a power of two: its reciprocal is exact, and so the product is the quotient
        torch.mul(x_N, 1 / divisor, out=out_N)
        return
    # By a tensor on the device: on CUDA, division by a Python number is a multiplication by its reciprocal.
    torch.div(x_N, torch.full((1,) * x_N.dim(), divisor, dtype=sum_dtype(x_N.dtype), device=x_N.device), out=out_N)


# By name. Filled at import: each compressor's file registers its own, and __init__.py imports the files.
REGISTRY: dict[str, Callable[..., Compressor]] = {}
# Bagua's spelling of the one codec that it has.
ALIASES = {"MinMaxUInt8": "minmax_uint8"}


def register_compressor(name: str, make: Callable[..., Compressor]) -> None:
    """Make a codec known by a name, wherever a compression can be named.

    Args:
        name: a name that is not taken.
        make: the class, or a function that returns a compressor.

    Raises:
        ValueError: `name` is taken.
    """
    if name in REGISTRY or name in ALIASES:
        raise ValueError(f"register_compressor: a compressor named {name!r} is registered already")
    REGISTRY[name] = make
