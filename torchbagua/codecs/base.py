"""Codecs: the interface, the flat tensors that they encode, the wire, full precision, and the lookup by name.

A *segment* is one parameter's elements in a flat tensor. A *block* is a part of a segment that a codec encodes as a
whole. A *chunk* is a sequence of blocks that one rank owns. A *shard* is a chunk within a node. A codec with
`block=None` encodes a whole chunk as one, and block boundaries then only determine where chunks may begin.

Shape suffixes in this package: N elements, C chunks, B blocks, L elements of a chunk, W wire bytes, R ranks.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from torchbagua.native.ops import ELEMENT_TYPES

ALIGNMENT_BYTES = 32

DEFAULT_BLOCK = 2048

# Elements per thread: 256 KiB of sums.
_ELEMENTS_PER_THREAD = 1 << 16

# Bagua's name for its only codec.
ALIASES = {"MinMaxUInt8": "minmax_uint8"}


def pad_bytes(num_bytes: int) -> int:
    """Return the next multiple of 32, so that every chunk of a wire is aligned."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class TensorSpec:
    """The description of a flat tensor to communicate, without its values.

    Attributes:
        segment_lengths: the number of elements of each parameter in the tensor, in order. No block crosses a parameter
            boundary.
        dtype: the dtype of the tensor.
        device: the device of the tensor.
        name: its name in events and errors.
    """

    segment_lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    name: str

    @property
    def num_elements(self) -> int:
        """The number of elements in the tensor."""
        return sum(self.segment_lengths)

    def block_bounds(self, block_elements: int) -> torch.Tensor:
        """Cut every segment into blocks of `block_elements`. The last block of a segment may be shorter.

        Returns:
            For B blocks, an int64 tensor of B + 1 ascending offsets, the first 0: block b extends from offset b to
                offset b + 1.
        """
        starts = []
        offset = 0
        for length in self.segment_lengths:
            starts.append(torch.arange(offset, offset + length, block_elements, dtype=torch.int64))
            offset += length
        return torch.cat([*starts, torch.tensor([offset], dtype=torch.int64)])

    def even_cuts(self, num_chunks: int, block_elements: int) -> tuple[int, ...]:
        """Assign whole blocks, in order, to chunks of about equal numbers of elements. A chunk may be empty.

        Returns:
            For C chunks, C + 1 offsets from 0 to the number of elements: chunk c extends from offset c to offset c + 1.
        """
        bounds_B = self.block_bounds(block_elements)
        targets = torch.tensor([chunk * self.num_elements // num_chunks for chunk in range(num_chunks)])
        cuts: list[int] = bounds_B[torch.searchsorted(bounds_B, targets)].tolist()
        return (*cuts, self.num_elements)

    def cuts_within(self, cuts: Sequence[int], num_pieces: int, block_elements: int) -> tuple[int, ...]:
        """Cut each chunk into pieces of whole blocks, with about equal numbers of elements. A piece may be empty.

        Returns:
            The cuts of the pieces of the first chunk, of the second, and so on.
        """
        bounds_B = self.block_bounds(block_elements)
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            targets = torch.tensor([start + piece * (stop - start) // num_pieces for piece in range(1, num_pieces)])
            pieces += [start, *bounds_B[torch.searchsorted(bounds_B, targets)].clamp(max=stop).tolist()]
        return (*pieces, self.num_elements)

    def restricted_to(self, elements: slice, dtype: torch.dtype) -> "TensorSpec":
        """Return the description of a tensor of `dtype` that consists of the given slice of elements."""
        lengths = []
        start = 0
        for length in self.segment_lengths:
            first, last = max(start, elements.start), min(start + length, elements.stop)
            if first < last:
                lengths.append(last - first)
            start += length
        return replace(self, segment_lengths=tuple(lengths), dtype=dtype)


@dataclass(frozen=True)
class WireLayout:
    """The positions of the chunks of a flat tensor, in the tensor and on the wire of a codec.

    Attributes:
        dtype: the dtype of the tensor.
        elements: for each chunk, its slice of the tensor.
        byte_slices: for each chunk, its slice of the wire.
        table: an int64 tensor with a row for each block: its start and length in the tensor, and the offsets of its
            header and payload on the wire. A sparse codec adds the number of elements that are sent. The table of a
            codec without blocks has no rows.
        chunk_blocks: for C chunks, C + 1 row indices of `table`: the rows of chunk c begin at entry c.
        start: the element at which this tensor begins in the tensor of which it is a chunk; 0 for a whole tensor.
    """

    dtype: torch.dtype
    elements: tuple[slice, ...]
    byte_slices: tuple[slice, ...]
    table: torch.Tensor
    chunk_blocks: tuple[int, ...]
    start: int = 0

    @cached_property
    def num_bytes(self) -> int:
        """The size of the whole wire in bytes."""
        return max((byte_slice.stop for byte_slice in self.byte_slices), default=0)

    def chunk(self, index: int) -> "WireLayout":
        """Return the layout of one chunk, as a separate tensor and wire."""
        elements, own_bytes = self.elements[index], self.byte_slices[index]
        first, last = self.chunk_blocks[index], self.chunk_blocks[index + 1]
        shift = self.table.new_zeros(self.table.shape[1])
        shift[:4] = torch.tensor([elements.start, 0, own_bytes.start, own_bytes.start])
        return WireLayout(
            dtype=self.dtype,
            elements=(slice(0, elements.stop - elements.start),),
            byte_slices=(slice(0, own_bytes.stop - own_bytes.start),),
            table=self.table[first:last] - shift,
            chunk_blocks=(0, last - first),
            start=self.start + elements.start,
        )

    def beginning(self, num_elements: int) -> "WireLayout":
        """Return the layout of the first blocks, about `num_elements` elements. For layouts of a single chunk only."""
        first = min(num_elements, self.elements[0].stop)
        num_blocks = 0
        if len(self.table):
            num_blocks = max(1, int((self.table[:, 0] + self.table[:, 1] <= first).sum()))
            first = int(self.table[num_blocks - 1, :2].sum())
        return replace(self, elements=(slice(0, first),), table=self.table[:num_blocks], chunk_blocks=(0, num_blocks))


def blocks_of_chunks(bounds_B: torch.Tensor, cuts: Sequence[int], name: str, *, are_whole: bool) -> list[int]:
    """Return the C + 1 block indices at which the C chunks of the tensor `name` begin and end."""
    wanted = torch.tensor(list(cuts), dtype=torch.int64)
    num_elements = int(bounds_B[-1])
    if len(wanted) < 2 or wanted[0] != 0 or wanted[-1] != num_elements or (wanted.diff() < 0).any():
        raise ValueError(f"the cuts of {name} must ascend from 0 to its {num_elements} elements, got {list(cuts)}")
    chunk_blocks = torch.searchsorted(bounds_B, wanted)
    within = wanted[bounds_B[chunk_blocks] != wanted].tolist()
    if within and are_whole:
        raise ValueError(f"the cuts of {name} must lie between its blocks, got {within[0]}, which is within a block")
    indices: list[int] = chunk_blocks.tolist()
    return indices


class Compressor(ABC):
    """A codec: encodes a flat tensor into bytes and decodes it. It has no state, sends nothing, and is deterministic.

    A *wire* is a contiguous uint8 tensor. `layout` describes its format. The decoded values do not depend on how blocks
    are assigned to chunks, unless a codec has `block=None`. All methods write to memory that the caller passes. That
    memory is uninitialized: do not read it before you write it.

    A subclass is a frozen dataclass and implements `wire_bytes`, `encode` and `decode`. The defaults of the other
    methods call these. Override a default with a faster implementation if its result is bitwise identical. To encode
    block by block, with a header and a payload for each block, subclass `BlockCodec`.

    Attributes:
        needs_feedback: whether the residual is so large that training fails without error feedback. Algorithms then
            accept the codec only with error feedback.
    """

    needs_feedback: ClassVar[bool] = False

    @property
    def block_elements(self) -> int:
        """The number of elements in a block. A chunk consists of blocks. No block crosses a parameter boundary."""
        return DEFAULT_BLOCK

    @property
    def wire_is_tensor(self) -> bool:
        """Whether the wire is the bytes of the tensor itself, so that a view of the tensor can be sent.

        If so, the caller may pass a list of R wires to `decode_mean` and `decode_mean_encode`. One of them may be such
        a view.
        """
        return False

    @property
    def codes_blocks(self) -> bool:
        """Whether blocks are encoded as a whole, so that a chunk must begin at a block boundary."""
        return True

    @property
    def blocks_are_independent(self) -> bool:
        """Whether each block is encoded independently, so that a chunk may be encoded in pieces."""
        return True

    def encodes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of `dtype` can be encoded: float32, bfloat16 and float16 by default."""
        return dtype in ELEMENT_TYPES

    @abstractmethod
    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the size of one chunk's wire in bytes, which does not depend on the values.

        The size is a multiple of 32, unless the wire is the tensor itself.
        """

    def layout(self, spec: TensorSpec, cuts: Sequence[int], *, equal_bytes: bool = False) -> WireLayout:
        """Lay out the wire of a tensor in chunks of `wire_bytes` bytes each.

        Args:
            spec: the description of the tensor.
            cuts: the elements at which chunks begin and end, see `TensorSpec.even_cuts`.
            equal_bytes: give each chunk as many bytes as the longest chunk.

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
        """Return the rows of `WireLayout.table` for the blocks of a chunk that begins at `first_byte` of the wire."""
        return torch.zeros(0, 4, dtype=torch.int64)

    @abstractmethod
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Encode the elements `x_N` into the bytes `wire_W`."""

    @abstractmethod
    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Decode the bytes `wire_W` into `x_N`, and round to its dtype: one that is encoded, or `sum_dtype` of it."""

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        """Decode R wires of one chunk, sum them in rank order, divide by `divisor`, and write the result to `x_N`.

        The sum is accumulated in the dtype of `x_N`: float32, or float64 for float64.
        """
        self.decode(wires_RW[0], layout, x_N)
        decoded_N = torch.empty_like(x_N)
        for wire_W in wires_RW[1:]:
            self.decode(wire_W, layout, decoded_N)
            x_N.add_(decoded_N)
        divide(x_N, divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Encode the result of `decode_mean` into `wire_W`. May overwrite `wires_RW`."""
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
        """Encode `x_N + residual_N` into `wire_W`, and write the new residual to `left_out_N`. All are float32.

        May overwrite `x_N`.
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
        """Encode the result of `decode_mean`, float32, as `encode_feedback` does. `memory_N` is scratch memory."""
        self.decode_mean(wires_RW, layout, divisor, memory_N)
        self.encode_feedback(memory_N, residual_N, layout, wire_W, left_out_N)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def divide(x_N: torch.Tensor, divisor: float, out_N: torch.Tensor) -> None:
    """Divide `x_N` by `divisor` in its `sum_dtype`, and write the quotient to `out_N`, which may have another dtype."""
    if math.frexp(divisor)[0] == 0.5:  # a power of two: its reciprocal is exact, so the product equals the quotient
        torch.mul(x_N, 1 / divisor, out=out_N)
        return
    # The divisor is a tensor on the device: CUDA replaces division by a Python number by multiplication by its
    # reciprocal.
    torch.div(x_N, torch.full((1,) * x_N.dim(), divisor, dtype=sum_dtype(x_N.dtype), device=x_N.device), out=out_N)


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


# By name. Filled at import: each codec's file registers its codec, and __init__.py imports the files.
REGISTRY: dict[str, Callable[..., Compressor]] = {}


def register_compressor(name: str, make: Callable[..., Compressor]) -> None:
    """Register a codec under a name, for every argument that accepts the name of a codec.

    Args:
        name: a name that is not registered yet.
        make: the class, or a function that returns a codec.

    Raises:
        ValueError: `name` is already registered.
    """
    if name in REGISTRY or name in ALIASES:
        raise ValueError(f"register_compressor: a codec named {name!r} is already registered")
    REGISTRY[name] = make


def check_compression(argument: str, compression: Any) -> str | Compressor | None:
    """Return a codec in the form that algorithms store: None, a Compressor, or its registered name."""
    if compression is None or isinstance(compression, Compressor):
        return compression
    name = ALIASES.get(compression, compression) if isinstance(compression, str) else None
    if name not in REGISTRY:
        raise ValueError(f"{argument} must be None, a Compressor or one of {sorted(REGISTRY)}, got {compression!r}")
    return name


def needs_feedback(compression: str | Compressor | None) -> bool:
    """Return `Compressor.needs_feedback` of a codec, given as for `check_compression`."""
    # Read from the class: creating a codec loads the kernels, which the description of an algorithm must not do.
    compression = check_compression("compression", compression)
    codec = REGISTRY[compression] if isinstance(compression, str) else compression
    return getattr(codec, "needs_feedback", False)


def by_name(compression: str | Compressor | None, **options: Any) -> Compressor:
    """Return the codec that is registered under a name."""
    if isinstance(compression, Compressor):
        return compression
    name = check_compression("compression", compression)
    return REGISTRY[name](**options) if isinstance(name, str) else Identity()


@dataclass(frozen=True)
class MeanCodecs:
    """The codecs that ranks use to send the tensors that they average.

    Args:
        codec: the codec between all ranks; with an `intra_codec`, between nodes.
        intra_codec: the codec within nodes. The mean is then hierarchical: on multi-node jobs with several ranks per
            node, ranks sum within nodes first. `Identity()` is full precision. None for a mean that ignores nodes.

    Raises:
        TypeError: an argument is not a Compressor.
    """

    codec: Compressor
    intra_codec: Compressor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Compressor):
            raise TypeError(f"MeanCodecs: codec must be a Compressor, got {self.codec!r}")
        if self.intra_codec is not None and not isinstance(self.intra_codec, Compressor):
            raise TypeError(f"MeanCodecs: intra_codec must be a Compressor or None, got {self.intra_codec!r}")

    @property
    def hierarchical(self) -> bool:
        """Whether ranks sum within nodes before they communicate between nodes."""
        return self.intra_codec is not None

    def for_dtype(self, dtype: torch.dtype) -> "MeanCodecs":
        """Return these codecs, with full precision instead of each codec that does not encode `dtype`."""
        intra_codec = None if self.intra_codec is None else codec_for_dtype(self.intra_codec, dtype)
        return MeanCodecs(codec_for_dtype(self.codec, dtype), intra_codec)


def codec_for_dtype(codec: Compressor, dtype: torch.dtype) -> Compressor:
    """Return `codec`, or the codec of full precision if `codec` does not encode `dtype`."""
    return codec if codec.encodes(dtype) else Identity()
