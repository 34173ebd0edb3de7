"""Every codec on every backend: plain torch follows the formula, and each backend gives the bytes of plain torch.

The backends are the CPU's kernels, CUDA's kernels compiled for the host, launched as NVRTC's are, and a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from backends import BACKENDS, Backend, backend_of
from host_kernels import HostKernels, Span
from native_codecs import (
    BLOCKK,
    CODECS,
    DTYPES,
    KINDS,
    MINMAX_UINT4,
    MINMAX_UINT8,
    SIGN_1BIT,
    TILE,
    TOPK,
    Codec,
    assert_same_values,
    hostile_values,
    lay_out,
    num_elements,
    random_bits,
)
from torchbagua.native import launcher
from torchbagua.native.ops import NATIVE_OPS

SHORT = (1, 2, 7, 8, 16, 31, 32, 33, 64, 127, 128, 129, 384)
# Around the tiles of CUDA's kernels and of the CPU's.
LONG = (2040, 2048, 2049, TILE, TILE + 1, 2 * TILE + 5)


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request)


@pytest.fixture(autouse=True)
def _small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread block of a GPU process several blocks of a table."""
    monkeypatch.setattr(launcher, "LARGEST_GRID", 3)


class Both:
    """A codec's operations on a backend, each compared with plain torch, over the blocks of a table.

    Bytes and elements between the blocks do not change. Written tensors begin some bytes (`wire_shift`) and elements
    (`x_shift`) after an aligned address.
    """

    def __init__(
        self, backend: Backend, codec: Codec, table: Tensor, wire_bytes: int, x_shift: int = 0, wire_shift: int = 0
    ) -> None:
        self._backend, self._codec, self._table = backend, codec, table
        self._wire = partial(self._filled, wire_bytes, wire_shift, torch.uint8)
        self._x = partial(self._filled, num_elements(table), x_shift)

    @staticmethod
    def _filled(length: int, shift: int, dtype: torch.dtype) -> Tensor:
        return torch.full((shift + length,), 7, dtype=dtype)[shift:]

    def __call__(self, operation: str, *arguments: Any, x_dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Run an operation; "wire" and "x" stand for written tensors, and "table" for the table. Return what it wrote.

        `x_dtype` is the dtype of a written x.
        """
        name = f"{self._codec.name}_{operation}"
        make: dict[str, Callable[[], Tensor]] = {"wire": self._wire, "x": partial(self._x, x_dtype)}
        results = []
        for kernel in [self._backend.kernel(name)] * self._backend.has(name) + [NATIVE_OPS[name]]:
            given = {"table": self._table, **{key: create() for key, create in make.items()}}
            kernel(*(given[each] if isinstance(each, str) else each for each in arguments))
            results.append([given[each] for each in arguments if each in ("wire", "x")])
        for own, expected in zip(results[0], results[-1], strict=True):
            if own.dtype == torch.uint8:
                assert torch.equal(own, expected), name
            else:
                assert_same_values(own, expected)
        return results[-1]


def blocks_of(codec: Codec, lengths: tuple[int, ...], each: int) -> tuple[Tensor, int]:
    """Return a table with `each` blocks of each length, in any order with gaps, and the size of its wire."""
    return lay_out(codec, [length for length in lengths if length <= codec.longest] * each)


def fill(table: Tensor, kind_of: Callable[[int], str], seed: int = 0) -> Tensor:
    """Return an x whose block b has values of the kind `kind_of(b)`."""
    x = torch.zeros(num_elements(table))
    for b, (start, length, *_) in enumerate(table.tolist()):
        x[start : start + length] = hostile_values(kind_of(b), length, 100 * seed + b)
    return x


def every_kind(b: int) -> str:
    return KINDS[b // len(SHORT) % len(KINDS)]  # a block of each kind for each length of SHORT


def dense_table(codec: Codec) -> tuple[Tensor, int]:
    """Return whole blocks without gaps, as in training: kernels read and write vectors."""
    lengths = [2048] * 4 + [128] * 8
    starts = np.cumsum([0, *lengths])
    payloads = 96 + np.cumsum([0, *map(codec.payload_bytes, lengths)])
    rows = [
        codec.row(int(starts[b]), length, codec.header_bytes * b, int(payloads[b])) for b, length in enumerate(lengths)
    ]
    return torch.tensor(rows), int(payloads[-1])


ORACLES: dict[str, Callable[[oracle.Array, int], oracle.Array]] = {
    "minmax_uint8": lambda x, kept: oracle.quantise_block(x),
    "minmax_uint4": lambda x, kept: oracle.quantise_block_4_bits(x),
    "sign1bit": lambda x, kept: oracle.sign_block(x),
    "topk": oracle.largest_of_block,
    "blockk": oracle.largest_run_of_block,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN
def test_plain_torch_decodes_what_the_oracle_does(codec: Codec) -> None:
    table, _ = blocks_of(codec, SHORT, len(KINDS))
    if codec in (TOPK, BLOCKK):  # blocks that keep one element, few and all
        table = torch.cat((table, table, table))
        for part, kept in zip(table.chunk(3)[1:], (torch.ones_like, lambda lengths: lengths), strict=True):
            part[:, 4] = kept(part[:, 1])
    x = fill(table, every_kind)
    for row in table.tolist():
        start, length, kept = row[0], row[1], row[-1]
        payload = codec.header_bytes + 1
        wire = torch.zeros(payload + 3 * length + 2, dtype=torch.uint8)
        alone = torch.tensor([[0, length, 0, payload, *row[4:]]])
        decoded = torch.zeros(length)
        NATIVE_OPS[f"{codec.name}_encode"](x[start : start + length], alone, wire)
        NATIVE_OPS[f"{codec.name}_decode"](wire, alone, decoded)
        expected = ORACLES[codec.name](x[start : start + length].numpy(), kept)
        assert_same_values(decoded, torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_of_values(backend: Backend, codec: Codec, dtype: torch.dtype) -> None:
    """For values of any kind, in blocks of any length and at any address."""
    tables = (
        (blocks_of(codec, SHORT, len(KINDS)), every_kind, [(0, 0), (1, 1)]),
        (blocks_of(codec, LONG, 2), lambda b: "scaled", [(0, 0)]),
        (dense_table(codec), lambda b: KINDS[b % len(KINDS)], [(0, 0), (1, 0), (0, 1), (0, 4), (3, 8)]),
    )
    for (table, wire_bytes), kind_of, shifts in tables:
        values = fill(table, kind_of).to(dtype)
        if backend.name == "host" and (codec in (TOPK, BLOCKK) or dtype != torch.float32):  # slow
            shifts = shifts[:: max(len(shifts) - 1, 1)] if codec not in (TOPK, BLOCKK) else shifts[-1:]
        for x_shift, wire_shift in shifts:
            both = Both(backend, codec, table, wire_bytes, x_shift, wire_shift)
            x = torch.cat((values.new_zeros(x_shift), values))[x_shift:]
            (wire,) = both("encode", x, "table", "wire")
            both("decode", wire, "table", "x", x_dtype=dtype)


def test_same_bytes_of_few_values(backend: Backend, codec: Codec) -> None:
    """All pairs of values at which a formula changes."""
    edges = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0**-119, 2.0**-118, 1.0, 254.0, 2.0**125, 2.0**126 - 2.0**118])
    edges = torch.cat((edges, torch.tensor([2.0**126 - 2.0**102, 2.0**126, 2.0**127, torch.inf, torch.nan])))
    edges = torch.cat((edges, edges[3:].nextafter(torch.tensor(torch.inf))))
    pairs = torch.cartesian_prod(torch.cat((edges, -edges)), torch.cat((edges, -edges)))
    pairs = pairs[:: 11 if backend.name == "host" else 1]
    payload = codec.header_bytes * len(pairs)
    rows = [
        codec.row(2 * b, 2, codec.header_bytes * b, payload + b * codec.payload_bytes(2)) for b in range(len(pairs))
    ]
    both = Both(backend, codec, torch.tensor(rows), payload + len(pairs) * codec.payload_bytes(2))
    (wire,) = both("encode", torch.cat((pairs.flatten(), torch.zeros(3))), "table", "wire")
    for dtype in DTYPES:
        both("decode", wire, "table", "x", x_dtype=dtype)


# The senders and the divisor of a mean; CUDA's kernels read 32 rows at a time.
MEANS = [(1, 1.0), (3, 3.0), (8, 8.0), (40, 40.0), (3, 2.0**-126), (3, 1e38)]


def test_same_bytes_of_means_and_of_feedback(backend: Backend, codec: Codec) -> None:
    finite = ("scaled", "constant", "zeros", "subnormal", "offset", "one sign")

    def kind_of(row: int, b: int) -> str:
        if b % 7 == 3 and row == 1:
            return "one not finite"
        return "zeros" if b % 5 == 0 else finite[(row + b) % len(finite)]  # the mean may be -0

    for (table, wire_bytes), shift, means in (
        (blocks_of(codec, (1, 7, 16, 33, 128, 130), 3), 0, MEANS),
        (blocks_of(codec, (2048, 2049, TILE + 1, 2 * TILE + 5), 1), 1, MEANS[1:2]),
        (dense_table(codec), 0, MEANS[2:3]),
        (dense_table(codec), 1, MEANS[1:2]),
    ):
        both = Both(backend, codec, table, wire_bytes, shift, shift)
        xs = [fill(table, partial(kind_of, row), row) for row in range(8)]
        rows = torch.zeros(8, wire_bytes, dtype=torch.uint8)
        for x, row in zip(xs, rows, strict=True):
            NATIVE_OPS[f"{codec.name}_encode"](x, table, row)
        for num_rows, divisor in means:
            senders = torch.cat([rows] * 5)[:num_rows].flatten()
            senders = torch.cat((senders.new_zeros(shift), senders))[shift:].view(num_rows, -1)
            both("decode_mean", senders, "table", divisor, "x")
            both("decode_mean_encode", senders, "table", divisor, "wire")
            both("decode_mean_encode_feedback", senders, "table", divisor, xs[0], "wire", "x")
        for x, residual in ((xs[0], xs[1] / 256), (xs[2], fill(table, every_kind))):
            both("encode_feedback", x, residual, "table", "wire", "x")


def test_same_bytes_from_any_wire(backend: Backend, codec: Codec) -> None:
    """Bytes that no encoder writes decode to NaN, or to values at other places of the block."""
    table, wire_bytes = blocks_of(codec, SHORT, 2 if backend.name == "host" else 8)
    both = Both(backend, codec, table, wire_bytes)
    draw = torch.Generator().manual_seed(0)
    anything = torch.randint(0, 256, (3, wire_bytes), dtype=torch.uint8, generator=draw)
    rows = torch.zeros(3, wire_bytes, dtype=torch.uint8)
    for seed, row in enumerate(rows):
        NATIVE_OPS[f"{codec.name}_encode"](fill(table, lambda b: ("scaled", "subnormal")[b % 2], seed), table, row)
    spoiled = torch.where(torch.rand(rows.shape, generator=draw) < 0.02, anything, rows)
    for wires in (anything, spoiled):
        both("decode", wires[0], "table", "x")
        both("decode_mean", wires, "table", 3.0, "x")
        both("decode_mean_encode", wires, "table", 3.0, "wire")


BAD_SCALES = [(torch.nan,), (torch.inf,), (2.0**126,), (-1.0,), (-0.0,)]
BAD_BOUNDS = [(torch.nan, 1.0), (1.0, torch.nan), (-torch.inf, 1.0), (0.0, torch.inf), (1.0, 2.0**126), (1, 0.5)]
BAD_HEADERS = {
    "minmax_uint8": BAD_BOUNDS,
    "minmax_uint4": BAD_BOUNDS,
    "sign1bit": BAD_SCALES,
    "topk": BAD_SCALES,
    "blockk": BAD_SCALES,
}


def test_a_header_that_no_encoder_writes_decodes_to_nan(backend: Backend, codec: Codec) -> None:
    """A mean with it has a header of NaN, and a payload of zeros."""
    bad = BAD_HEADERS[codec.name]
    table, wire_bytes = lay_out(codec, [128] * len(bad))
    wire = torch.zeros(wire_bytes, dtype=torch.uint8)
    NATIVE_OPS[f"{codec.name}_encode"](torch.linspace(-1, 1, num_elements(table)), table, wire)
    header_dtype = torch.bfloat16 if codec is MINMAX_UINT4 else torch.float32
    for (_, _, header, *_), values in zip(table.tolist(), bad, strict=True):
        wire[header : header + codec.header_bytes] = torch.tensor(values, dtype=header_dtype).view(torch.uint8)
    both = Both(backend, codec, table, wire_bytes)
    for dtype in DTYPES:
        (decoded,) = both("decode", wire, "table", "x", x_dtype=dtype)
        assert all(decoded[start : start + 128].isnan().all() for start in table[:, 0].tolist())
    (mean,) = both("decode_mean_encode", torch.stack((wire, wire)), "table", 2.0, "wire")
    for _, length, header, payload, *_ in table.tolist():
        assert mean[header : header + codec.header_bytes].view(header_dtype).isnan().all()
        assert not mean[payload : payload + codec.payload_bytes(length)].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bytes_of_every_16_bit_value_and_of_values_between(backend: Backend, dtype: torch.dtype) -> None:
    """A block of one value is exact, and rounded to nearest even when it is decoded to another dtype."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[:: 101 if backend.name == "host" else 1].contiguous()  # a thread of the host for each of the kernel's
    index = torch.arange(len(x))
    table = torch.stack((index, torch.ones_like(index), 8 * index, 8 * len(x) + index), dim=1)
    both = Both(backend, MINMAX_UINT8, table, 9 * len(x))
    (wire,) = both("encode", torch.cat((x, x[:3])), "table", "wire")
    headers = wire[: 8 * len(x)].view(torch.float32).view(-1, 2)
    as_float = x.float() + 0.0
    assert_same_values(headers[:, 0].contiguous(), torch.where(as_float.abs() < 2.0**126, as_float, torch.nan))

    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    near = random_bits(len(x), 0).to(dtype).float().view(torch.int32)
    values = (near + half * (index % 2) + index // 2 % 5 - 2).to(torch.int32).view(torch.float32)
    values = torch.where(values.abs() < 2.0**126, values, 1.0)
    wire = torch.cat((values.repeat_interleave(2).view(torch.uint8), torch.zeros(len(values), dtype=torch.uint8)))
    (decoded,) = both("decode", wire, "table", "x", x_dtype=dtype)
    assert_same_values(decoded[: len(values)] + 0.0, values.to(dtype) + 0.0)


@pytest.mark.parametrize(
    ("codec", "values", "kept", "wire"),
    [
        # Minimum and maximum, 0 and 1 in bfloat16, then 15 and 4 in a byte, and 0.
        (MINMAX_UINT4, [1.0, 4 / 15, 0.0], None, [0, 0, 0x80, 0x3F, 0x4F, 0x00]),
        (SIGN_1BIT, [1.0, -0.0, -2.0, 3.0, 4.0, -1.0, 0.0, 0.0, -7.0], None, [0, 0, 0, 64, 0b00100110, 1]),
        # Four bits an index, ascending. Among equal magnitudes the first elements are sent.
        (TOPK, [0, -2, 1, 254, 2, -2, 0.5, 1, 0], 3, [0, 0, 0x7E, 0x43, 0x31, 0x04, 127, 255, 129]),
        (BLOCKK, [1, 0, 0, 5, -4, 3, 0, 6], 3, [0, 0, 0xA0, 0x40, 1, 0, 255, 26, 204]),
        (BLOCKK, [3, 0, 4, 0, 0, -5, 0, 0], 3, [0, 0, 0x80, 0x40, 0, 0, 223, 128, 255]),  # equal sums: the first run
        (BLOCKK, [0, 0, 0, 0, 0, 0, 0, 2], 3, [0, 0, 0, 0x40, 2, 0, 128, 128, 255]),  # the last run begins at 5
    ],
)
def test_bytes_of_a_block(
    backend: Backend, codec: Codec, values: list[float], kept: int | None, wire: list[int]
) -> None:
    table = torch.tensor([[0, len(values), 0, codec.header_bytes, *([] if kept is None else [kept])]])
    (found,) = Both(backend, codec, table, len(wire))("encode", torch.tensor(values + [0.0] * 3), "table", "wire")
    assert found.tolist() == wire


@pytest.mark.parametrize(
    ("codec", "bad", "good"),
    [
        (TOPK, [[0, 0, 0], [1, 0, 2], [0, 2, 2], [7, 8, 9], [0, 1, 9], [13, 14, 15]], [6, 7, 8]),
        (BLOCKK, [[3, 0], [0, 1], [255, 255]], [2, 0]),
    ],
    ids=["indices that do not ascend in the block", "a run that ends after the block"],
)
def test_wrong_places_decode_to_nan(backend: Backend, codec: Codec, bad: list[list[int]], good: list[int]) -> None:
    length = 9 if codec is TOPK else 8
    both = Both(backend, codec, torch.tensor([[0, length, 0, 4, 3]]), 9)
    for places in (*bad, good):
        packed = [places[0] | places[1] << 4, places[2]] if codec is TOPK else places
        wire = torch.tensor([0, 0, 128, 63, *packed, 200, 100, 255]).to(torch.uint8)
        (decoded,) = both("decode", wire, "table", "x")
        assert bool(decoded[:length].isnan().all()) == (places != good)


def test_blocks_beyond_32_bits(host_kernels: HostKernels, codec: Codec) -> None:
    """The last block of 2^33 elements; only that block is in memory."""
    before, length, payload = 2**33, 2048, codec.payload_bytes(2048)
    x, wire = torch.randn(length), torch.zeros(8 + payload, dtype=torch.uint8)
    table = torch.tensor([codec.row(before, length, before, before + 8)])
    near = torch.tensor([codec.row(0, length, 0, 8)])
    whole_x = Span(x.data_ptr() - 4 * before, before + length)
    whole_wire = Span(wire.data_ptr() - before, before + 8 + payload)
    expected, decoded = torch.zeros_like(wire), torch.zeros(length)
    NATIVE_OPS[f"{codec.name}_encode"](x, near, expected)
    NATIVE_OPS[f"{codec.name}_decode"](expected, near, decoded)
    grid: dict[str, Any] = {"blocks": range(1), "num_blocks": 1, "num_threads": launcher.THREADS}
    assert host_kernels.run(f"torchbagua_{codec.name}_encode_float32", whole_x, table, whole_wire, **grid) == "done"
    assert torch.equal(wire, expected)
    assert host_kernels.run(f"torchbagua_{codec.name}_decode_float32", whole_wire, table, whole_x, **grid) == "done"
    assert torch.equal(x, decoded)


def test_opcheck(device: torch.device) -> None:
    """All codecs register their operations alike, but for the fields of a table."""
    codec = TOPK
    table, wire_bytes = lay_out(codec, [128, 1, 129])
    x = hostile_values("scaled", num_elements(table), 38)
    wire = torch.zeros(wire_bytes, dtype=torch.uint8)
    NATIVE_OPS[f"{codec.name}_encode"](x, table, wire)
    x, table, wire = x.to(device), table.to(device), wire.to(device)
    rows, left_out = wire.repeat(3, 1), torch.zeros_like(x)
    for operation, arguments in {
        "encode": (x, table, wire),
        "decode": (wire, table, x),
        "decode_mean": (rows, table, 3.0, x),
        "decode_mean_encode": (rows, table, 3.0, wire),
        "encode_feedback": (x, x.flip(0), table, wire, left_out),
        "decode_mean_encode_feedback": (rows, table, 3.0, x, wire, left_out),
    }.items():
        torch.library.opcheck(codec.native(operation), arguments)
