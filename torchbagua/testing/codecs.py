"""check_codec: tests that a codec keeps the contract of `Compressor`, on which every algorithm relies."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from torchbagua.codecs.base import Compressor, TensorSpec, WireLayout, divide, sum_dtype
from torchbagua.testing.transports.member import Mismatch

T = TypeVar("T")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Samples of longer blocks have only short ones.
_LONGEST_BLOCK = 4096

# Of the memory before and after a tensor that a codec gets.
_GUARD_BYTES = 64

# Memory is not initialized: whatever it contains, the result is the same.
_FILLS = (0x00, 0xFF, 0x5A)


class CodecFault(AssertionError):
    """A codec failed a check. Names the check, the tensor, and the expected and actual results."""


def check_codec(codec: Compressor, *, device: torch.device | None = None) -> list[str]:
    """Test that a codec keeps the contract of `Compressor`, in this process and without a group.

    It encodes and decodes tensors of several parameters, in one and several chunks, in every dtype that the codec
    encodes. A method that replaces a default of `Compressor` must give bitwise the result of the default.

    Args:
        codec: the codec.
        device: the device of the tensors; by default the CPU.

    Returns:
        the names of the checks.

    Raises:
        TypeError: `codec` is not a Compressor.
        CodecFault: the codec failed a check.
    """
    if not isinstance(codec, Compressor):
        raise TypeError(f"check_codec: codec must be a torchbagua.codecs.Compressor, got {codec!r}")
    names = []
    for check in _CHECKS:
        name = check.__name__.removeprefix("_check_")
        try:
            check(codec, device or torch.device("cpu"))
        except Mismatch as mismatch:
            raise CodecFault(f"torchbagua: check {name!r} of {codec!r} failed: {mismatch}") from mismatch.__cause__
        names.append(name)
    return names


@dataclass(frozen=True)
class _Sample:
    """A tensor to encode, with the layout of its wire."""

    codec: Compressor
    spec: TensorSpec
    layout: WireLayout
    what: str

    def values(self, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed values, and some zeros and equal values."""
        generator = torch.Generator().manual_seed(seed)
        x_N = scale * torch.randn(self.spec.num_elements, generator=generator, dtype=torch.float64)
        x_N[3::11] = 0.0
        x_N[5::13] = scale
        return x_N.to(self.spec.dtype).to(self.spec.device)

    def encode(self, x_N: torch.Tensor, fill: int = _FILLS[0], layout: WireLayout | None = None) -> torch.Tensor:
        """Return the wire of `x_N`, encoded into memory that contains `fill`."""
        layout = layout or self.layout
        before = x_N.clone()
        what = f"encode of {self.what}"
        wire_W = self.write_wire(what, layout, fill, lambda wire_W: self.codec.encode(x_N, layout, wire_W))
        if not _equal(x_N, before):
            raise Mismatch(f"{what}: expected x_N not to change")
        return wire_W

    def decode(
        self,
        wire_W: torch.Tensor,
        dtype: torch.dtype | None = None,
        fill: int = _FILLS[0],
        layout: WireLayout | None = None,
    ) -> torch.Tensor:
        """Return the values of `wire_W`, decoded into memory that contains `fill`."""
        layout = layout or self.layout
        dtype = dtype or sum_dtype(self.spec.dtype)
        num_elements = max((chunk.stop for chunk in layout.elements), default=0)
        memory = self._memory(num_elements * dtype.itemsize, fill)
        x_N = memory[_GUARD_BYTES:-_GUARD_BYTES].view(dtype)
        before = wire_W.clone()
        what = f"decode of {self.what}"
        _call(what, lambda: self.codec.decode(wire_W, layout, x_N))
        _expect_untouched(f"{what}: the memory around x_N", memory, fill)
        if not torch.equal(wire_W, before):
            raise Mismatch(f"{what}: expected wire_W not to change")
        return x_N.clone()

    def wires(self, num_rows: int) -> torch.Tensor:
        """Return the wires of different values, one of each rank."""
        return torch.stack([self.encode(self.values(seed)) for seed in range(num_rows)])

    def write_wire(
        self, what: str, layout: WireLayout, fill: int, write: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """Return the wire that `write` writes into memory that contains `fill`, and nowhere else."""
        memory = self._memory(layout.num_bytes, fill)
        wire_W = memory[_GUARD_BYTES:-_GUARD_BYTES]
        _call(what, lambda: write(wire_W))
        _expect_untouched(f"{what}: the memory around wire_W", memory, fill)
        return wire_W.clone()

    def _memory(self, num_bytes: int, fill: int) -> torch.Tensor:
        return torch.full((num_bytes + 2 * _GUARD_BYTES,), fill, dtype=torch.uint8, device=self.spec.device)

    def parts(self) -> Iterator[slice]:
        """Return the parts of the tensor that are encoded independently: blocks, or chunks."""
        if not self.codec.blocks_are_independent:
            yield from self.layout.elements
            return
        for start, stop in itertools.pairwise(self.spec.block_bounds(self.codec.block_elements).tolist()):
            yield slice(start, stop)


def _samples(
    codec: Compressor,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    chunk_counts: Sequence[int] = (1, 3),
) -> Iterator[_Sample]:
    """Return samples whose blocks are full, short and of one element, and whose chunks may be empty."""
    block = min(codec.block_elements, _LONGEST_BLOCK)
    encoded = [dtype for dtype in dtypes if codec.encodes(dtype)]
    for segments in ((1,), (7, 2 * block + 3, 1, block), (block - 1, 40, 5)):
        for dtype, num_chunks in itertools.product(encoded, chunk_counts):
            spec = TensorSpec(segments, dtype, device, "a tensor of check_codec")
            chunks = f"{num_chunks} chunks" if num_chunks > 1 else "one chunk"
            what = f"parameters of {segments} elements of {dtype} in {chunks}"
            yield _Sample(codec, spec, _call(f"layout of {what}", partial(_layout, codec, spec, num_chunks)), what)


def _layout(codec: Compressor, spec: TensorSpec, num_chunks: int) -> WireLayout:
    return codec.layout(spec, spec.even_cuts(num_chunks, codec.block_elements))


def _call(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise Mismatch(f"{what}: expected no error, got {type(error).__name__}: {error}") from error


def _expect_untouched(what: str, memory: torch.Tensor, fill: int) -> None:
    around = torch.cat([memory[:_GUARD_BYTES], memory[-_GUARD_BYTES:]])
    if (around != fill).any():
        raise Mismatch(f"{what}: expected it not to change")


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal, but for the bits of NaN."""
    are_nan = first.isnan() & second.isnan()
    return bool((are_nan | ((first == second) & (first.signbit() == second.signbit()))).all())


def _expect_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if _equal(actual, expected):
        return
    differs = (actual != expected) | (actual.signbit() != expected.signbit())
    place = int((differs & ~(actual.isnan() & expected.isnan())).nonzero()[0])
    raise Mismatch(f"{what}: expected {expected[place].item()!r} at element {place}, got {actual[place].item()!r}")


def _check_description(codec: Compressor, device: torch.device) -> None:
    """Ranks compare codecs by their text, and settings contain them: equal options give an equal codec."""
    other = copy.deepcopy(codec)
    if not _call("hash", lambda: other == codec and hash(other) == hash(codec) and repr(other) == repr(codec)):
        raise Mismatch(
            f"deepcopy: expected an equal codec with the same hash and repr, got {other!r}; make the class a frozen "
            "dataclass whose fields are its options"
        )
    if not any(codec.encodes(dtype) for dtype in _DTYPES):
        raise Mismatch(f"encodes: expected at least one of {', '.join(map(str, _DTYPES))}, got none")


def _check_sizes(codec: Compressor, device: torch.device) -> None:
    """Each chunk takes `wire_bytes` bytes, a multiple of 32."""
    for sample in _samples(codec, device, chunk_counts=(1, 2, 3)):
        for elements, own_bytes in zip(sample.layout.elements, sample.layout.byte_slices, strict=True):
            bounds = sample.spec.block_bounds(codec.block_elements).tolist()
            num_blocks = sum(elements.start <= start < elements.stop for start in bounds[:-1])
            num_elements = elements.stop - elements.start
            num_bytes = codec.wire_bytes(num_elements, num_blocks, sample.spec.dtype)
            what = f"wire_bytes({num_elements}, {num_blocks}, {sample.spec.dtype})"
            if num_bytes < 0 or (num_bytes % 32 and not codec.wire_is_tensor):
                raise Mismatch(f"{what}: expected a multiple of 32, got {num_bytes}; round up with pad_bytes")
            if own_bytes.stop - own_bytes.start != num_bytes:
                raise Mismatch(f"layout: expected {num_bytes} bytes, as {what} returns, got {own_bytes}")


def _check_same_values(codec: Compressor, device: torch.device) -> None:
    """The same values give the same result, whatever the memory contained."""
    for sample in _samples(codec, device):
        x_N = sample.values()
        wire_W = sample.encode(x_N)
        if not torch.equal(sample.encode(x_N), wire_W):
            raise Mismatch(f"encode of {sample.what}, again: expected the same wire")
        decoded = sample.decode(wire_W)
        for fill in _FILLS:
            again = sample.decode(sample.encode(x_N, fill), fill=fill)
            what = f"encode and decode of {sample.what}, again, into memory full of {fill:#04x}"
            _expect_equal(what, again, decoded)


def _check_blocks(codec: Compressor, device: torch.device) -> None:
    """Other values of one block change no other block."""
    for sample in _samples(codec, device):
        x_N, others_N = sample.values(), sample.values(seed=1, scale=100.0)
        decoded = sample.decode(sample.encode(x_N))
        for part in sample.parts():
            changed_N = x_N.clone()
            changed_N[part] = others_N[part]
            actual = sample.decode(sample.encode(changed_N))
            what = (
                f"encode and decode of {sample.what}, with other values in elements {part.start} to {part.stop - 1} "
                "alone; if block_format.payload_bytes is too small, blocks overlap; if blocks depend on each other, "
                "blocks_are_independent must be False"
            )
            _expect_equal(what, actual, torch.cat([decoded[: part.start], actual[part], decoded[part.stop :]]))


def _check_chunks(codec: Compressor, device: torch.device) -> None:
    """A chunk has the same values whether it is encoded and decoded alone or together with others."""
    for sample in _samples(codec, device, chunk_counts=(2, 3)):
        x_N = sample.values()
        wire_W = sample.encode(x_N)
        decoded = sample.decode(wire_W)
        for index, (elements, own_bytes) in enumerate(
            zip(sample.layout.elements, sample.layout.byte_slices, strict=True)
        ):
            layout = sample.layout.chunk(index)
            alone = sample.encode(x_N[elements].clone(), layout=layout)
            what = f"chunk {index} of {sample.what}"
            for how, wire in (("encoded with all", wire_W[own_bytes].clone()), ("encoded alone", alone)):
                expected = decoded[elements]
                _expect_equal(f"{what}, {how} and decoded alone", sample.decode(wire, layout=layout), expected)
        if not codec.wire_is_tensor:
            cuts = [0, *(elements.stop for elements in sample.layout.elements)]
            padded = codec.layout(sample.spec, cuts, equal_bytes=True)
            equal = sample.decode(sample.encode(x_N, layout=padded), layout=padded)
            _expect_equal(f"encode and decode of {sample.what}, with equal_bytes", equal, decoded)
        if codec.blocks_are_independent:
            whole = _layout(codec, sample.spec, 1)
            one = sample.decode(sample.encode(x_N, layout=whole), layout=whole)
            _expect_equal(f"encode and decode of {sample.what}, compared with one chunk", decoded, one)


def _check_dtypes(codec: Compressor, device: torch.device) -> None:
    """Values are decoded into each dtype that the codec encodes and sums alike, rounded once."""
    for sample in _samples(codec, device):
        wire_W = sample.encode(sample.values())
        decoded = sample.decode(wire_W)
        for dtype in filter(codec.encodes, _DTYPES):
            if sum_dtype(dtype) != sum_dtype(sample.spec.dtype):
                continue
            what = f"decode of {sample.what} into {dtype}"
            _expect_equal(what, sample.decode(wire_W, dtype, fill=_FILLS[-1]), decoded.to(dtype))


def _check_not_finite(codec: Compressor, device: torch.device) -> None:
    """A block with NaN or Inf decodes to NaN or Inf, on which a GradScaler skips the step, and changes no other block.

    Values that are large or subnormal raise no error.
    """
    for sample in _samples(codec, device):
        x_N = sample.values()
        decoded = sample.decode(sample.encode(x_N))
        for scale in (0.0, torch.finfo(sample.spec.dtype).max / 8, torch.finfo(sample.spec.dtype).tiny / 8):
            sample.decode(sample.encode(sample.values(scale=scale)))
        for part, value in zip(sample.parts(), itertools.cycle((torch.nan, torch.inf, -torch.inf)), strict=False):
            if part.start == part.stop:  # an empty chunk
                continue
            broken_N = x_N.clone()
            broken_N[part.stop - 1] = value
            actual = sample.decode(sample.encode(broken_N))
            what = f"encode and decode of {sample.what}, with {value} at element {part.stop - 1}"
            if actual[part].isfinite().all():
                raise Mismatch(f"{what}: expected NaN or Inf in elements {part.start} to {part.stop - 1}, got none")
            _expect_equal(what, actual, torch.cat([decoded[: part.start], actual[part], decoded[part.stop :]]))


def _check_mean(codec: Compressor, device: torch.device) -> None:
    """`decode_mean` sums in rank order and divides; `decode_mean_encode` encodes the same mean."""
    for sample in _samples(codec, device, chunk_counts=(1,)):
        for num_rows, divisor in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 1.0)):
            _check_mean_of(sample, num_rows, divisor)


def _check_mean_of(sample: _Sample, num_rows: int, divisor: float) -> None:
    codec, layout, wires_RW = sample.codec, sample.layout, sample.wires(num_rows)
    mean_N = sample.decode(wires_RW[0])
    for wire_W in wires_RW[1:]:
        mean_N += sample.decode(wire_W)
    divide(mean_N, divisor, mean_N)
    own_N = torch.full_like(mean_N, torch.nan)
    wires = f"of {num_rows} wires of {sample.what}, divided by {divisor:g}"
    _call(f"decode_mean {wires}", lambda: codec.decode_mean(wires_RW, layout, divisor, own_N))
    _expect_equal(f"decode_mean {wires}", own_N, mean_N)
    what = f"decode_mean_encode {wires}"
    wire_W = sample.write_wire(
        what, layout, _FILLS[-1], lambda wire_W: codec.decode_mean_encode(wires_RW, layout, divisor, wire_W)
    )
    _expect_equal(what, sample.decode(wire_W), sample.decode(sample.encode(mean_N)))


def _check_feedback(codec: Compressor, device: torch.device) -> None:
    """The sum with the residual is encoded, and the new residual is what the wire leaves out."""
    for sample in _samples(codec, device, dtypes=(torch.float32,), chunk_counts=(1,)):
        _check_encode_feedback(sample)
        for num_rows in (2, 3):
            _check_decode_mean_encode_feedback(sample, num_rows)


def _check_encode_feedback(sample: _Sample) -> None:
    codec, layout, what = sample.codec, sample.layout, f"encode_feedback of {sample.what}"
    x_N, residual_N = sample.values(), sample.values(7, scale=0.1)
    sum_N, left_out_N = x_N + residual_N, torch.full_like(x_N, torch.nan)
    wire_W = sample.write_wire(
        what, layout, _FILLS[-1], lambda wire_W: codec.encode_feedback(x_N, residual_N, layout, wire_W, left_out_N)
    )
    _expect_feedback(sample, what, wire_W, sum_N, left_out_N)


def _check_decode_mean_encode_feedback(sample: _Sample, num_rows: int) -> None:
    codec, layout, wires_RW = sample.codec, sample.layout, sample.wires(num_rows)
    what = f"decode_mean_encode_feedback of {num_rows} wires of {sample.what}"
    residual_N = sample.values(7, scale=0.1)
    sum_N, left_out_N, memory_N = (torch.full_like(residual_N, torch.nan) for _ in range(3))
    codec.decode_mean(wires_RW.clone(), layout, num_rows, sum_N)
    sum_N += residual_N
    wire_W = sample.write_wire(
        what,
        layout,
        _FILLS[-1],
        lambda wire_W: codec.decode_mean_encode_feedback(
            wires_RW, layout, num_rows, residual_N, wire_W, left_out_N, memory_N
        ),
    )
    _expect_feedback(sample, what, wire_W, sum_N, left_out_N)


def _expect_feedback(
    sample: _Sample, what: str, wire_W: torch.Tensor, sum_N: torch.Tensor, left_out_N: torch.Tensor
) -> None:
    decoded = sample.decode(wire_W)
    _expect_equal(what, decoded, sample.decode(sample.encode(sum_N)))
    _expect_equal(f"{what}: left_out_N", left_out_N, sum_N - decoded)


_CHECKS = (
    _check_description,
    _check_sizes,
    _check_same_values,
    _check_blocks,
    _check_chunks,
    _check_dtypes,
    _check_not_finite,
    _check_mean,
    _check_feedback,
)
