"""The kernels of MinMaxUInt8: the native ones give the bytes of the reference, and both keep what its formula promises.

The tests whose name has `bytes` run once more under every other instruction set that this CPU has.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchbagua import native
from torchbagua.native import reference

OPS = torch.ops.torchbagua
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTRUCTION_SETS = ("default", "avx2", "avx512")
HEADER_BYTES = 8
L = 128  # a block length of the tests: four of the kernels' 32 lanes
TILE = 4096  # elements: the kernels take longer blocks in several steps


@pytest.fixture(autouse=True, scope="module")
def _native_kernels() -> None:
    native.load()
    assert {row.path for row in native.status()} <= {"aot", "jit"}, native.status()


def lay_out(lengths: list[int], seed: int = 0) -> tuple[Tensor, int]:
    """A table of blocks of `lengths`, and its wire's size: in x, in the wire and in the table they stand in any order,
    with gaps between them."""
    generator = torch.Generator().manual_seed(seed)

    def place(sizes: list[int], unit: int) -> list[int]:
        offsets, offset = [0] * len(sizes), 0
        for index in torch.randperm(len(sizes), generator=generator).tolist():
            offset += unit * int(torch.randint(0, 3, (), generator=generator))
            offsets[index] = offset
            offset += sizes[index]
        return offsets

    start = place(lengths, 1)
    header = place([HEADER_BYTES] * len(lengths), 4)
    first_payload = max(header, default=0) + HEADER_BYTES
    payload = [first_payload + offset for offset in place(lengths, 1)]
    table = torch.tensor([start, lengths, header, payload], dtype=torch.int64).T.contiguous()
    return table, max((p + n for p, n in zip(payload, lengths, strict=True)), default=0) + 5


def num_elements(table: Tensor) -> int:
    """The size of an x that holds all blocks and a little more."""
    return int((table[:, 0] + table[:, 1]).max()) + 3 if len(table) else 0


def random_bits(count: int, seed: int) -> Tensor:
    """Every float32 there is: NaN, Inf, subnormals and all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def hostile_values(kind: str, count: int, seed: int) -> Tensor:
    """`count` float32 values of one kind of trouble."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    if kind == "any bits":
        return random_bits(count, seed)
    if kind == "finite bits":
        bits = random_bits(count, seed)
        return torch.where(bits.abs() < 2.0**126, bits, 1.0)
    if kind == "one not finite":
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0**126, -(2.0**127)])[seed % 5]
        normal[seed % max(count, 1) :][:1] = bad
        return normal
    if kind == "constant":
        return random_bits(1, seed).nan_to_num().clamp(-1e37, 1e37).repeat(count)
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "subnormal":
        return normal * 1e-39
    if kind == "offset":
        return 1e3 + normal * 1e-3
    if kind == "one sign":
        return normal.abs() + 1e-3
    return normal * 10.0 ** ((seed % 77) - 38)  # "scaled": 1e-38 to 1e38


KINDS = ("scaled", "any bits", "finite bits", "one not finite", "constant", "zeros", "subnormal", "offset", "one sign")
lengths_of_blocks = st.lists(st.sampled_from((1, 2, 31, 32, 33, L - 1, L, L + 1, 3 * L)), max_size=6)
seeds = st.integers(0, 2**31)
several = settings(max_examples=60, deadline=None)


def assert_same_values(got: Tensor, expected: Tensor) -> None:
    """Equal bits, but any NaN for a NaN: its payload is the processor's own affair."""
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
    assert same.all(), (got[~same], expected[~same])


def encoded_by_both(x: Tensor, table: Tensor, wire_bytes: int, seed: int = 0) -> Tensor:
    """The wire of x, which native and reference agree on, padding (random here) included."""
    before = torch.randint(0, 256, (wire_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    wires = before.clone(), before.clone()
    OPS.minmax_uint8_encode(x, table, wires[0])
    reference.minmax_uint8_encode(x, table, wires[1])
    assert torch.equal(*wires)
    return wires[0]


def decoded_by_both(wire: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The x of a wire, which native and reference agree on; what lies between the blocks is 7."""
    outputs = [torch.full((num_elements(table),), 7.0, dtype=dtype) for _ in range(2)]
    OPS.minmax_uint8_decode(wire, table, outputs[0])
    reference.minmax_uint8_decode(wire, table, outputs[1])
    assert_same_values(*outputs)
    return outputs[0]


def mean_by_both(rows: Tensor, table: Tensor, divisor: float) -> Tensor:
    """The wire of the mean of rows, which native and reference agree on; what lies between the blocks is 7."""
    wires = [torch.full_like(rows[0], 7) for _ in range(2)]
    OPS.minmax_uint8_decode_mean_encode(rows, table, divisor, wires[0])
    reference.minmax_uint8_decode_mean_encode(rows, table, divisor, wires[1])
    assert torch.equal(*wires)
    return wires[0]


@several
@given(lengths_of_blocks, st.sampled_from(KINDS), st.sampled_from(DTYPES), seeds)
def test_same_bytes_for_any_values(lengths: list[int], kind: str, dtype: torch.dtype, seed: int) -> None:
    table, wire_bytes = lay_out(lengths, seed)
    x = hostile_values(kind, num_elements(table), seed).to(dtype)

    wire = encoded_by_both(x, table, wire_bytes, seed)

    decoded_by_both(wire, table, dtype)


@several
@given(st.lists(st.floats(width=32), min_size=1, max_size=12), st.sampled_from(DTYPES))
def test_same_bytes_for_few_values(values: list[float], dtype: torch.dtype) -> None:
    table, wire_bytes = lay_out([len(values)])
    x = torch.zeros(num_elements(table), dtype=dtype)
    x[int(table[0, 0]) :][: len(values)] = torch.tensor(values).to(dtype)

    decoded_by_both(encoded_by_both(x, table, wire_bytes), table, dtype)


@several
@given(lengths_of_blocks, st.integers(1, 5), st.sampled_from(DTYPES), seeds)
def test_same_bytes_from_any_wire(lengths: list[int], num_rows: int, dtype: torch.dtype, seed: int) -> None:
    table, wire_bytes = lay_out(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (num_rows, wire_bytes), dtype=torch.uint8, generator=generator)

    decoded_by_both(rows[0], table, dtype)
    mean_by_both(rows, table, float(num_rows))


@several
@given(lengths_of_blocks, st.integers(1, 5), st.sampled_from(KINDS), st.floats(2.0**-10, 2.0**10, width=32), seeds)
def test_same_bytes_of_a_mean(lengths: list[int], num_rows: int, kind: str, divisor: float, seed: int) -> None:
    table, wire_bytes = lay_out(lengths, seed)
    rows = torch.stack(
        [
            encoded_by_both(hostile_values(kind, num_elements(table), seed + row), table, wire_bytes)
            for row in range(num_rows)
        ]
    )

    wire = mean_by_both(rows, table, divisor)

    total = decoded_by_both(rows[0], table, torch.float32)
    for row in rows[1:]:
        total = total + decoded_by_both(row, table, torch.float32)
    mean = torch.div(total, torch.full_like(total, divisor))
    again = torch.full_like(wire, 7)
    reference.minmax_uint8_encode(mean, table, again)
    assert torch.equal(wire, again), "the fused operation is decode, sum in row order, divide, encode"


@pytest.mark.parametrize("length", [TILE, TILE + 1, 3 * TILE + 5, 50_000])
def test_same_bytes_of_blocks_longer_than_a_tile(length: int) -> None:
    table, wire_bytes = lay_out([length, 100, length])
    values = [hostile_values("scaled", num_elements(table), seed) for seed in (38, 39, 40)]
    values[0][int(table[0, 0]) + length - 1] = 1e6  # an extreme that only the last tile of the block has

    rows = torch.stack([encoded_by_both(x, table, wire_bytes) for x in values])

    decoded_by_both(mean_by_both(rows, table, 3.0), table, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bytes_of_every_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    index = torch.arange(len(x))
    table = torch.stack((index, torch.ones_like(index), 8 * index, 8 * len(x) + index), dim=1)

    wire = encoded_by_both(x, table, 9 * len(x))

    headers = wire[: 8 * len(x)].view(torch.float32).view(-1, 2)
    as_float = x.to(torch.float32) + 0.0
    usable = as_float.abs() < 2.0**126
    assert_same_values(headers[:, 0].contiguous(), torch.where(usable, as_float, torch.nan))


@several
@given(st.sampled_from((torch.bfloat16, torch.float16)), seeds)
def test_same_bytes_of_rounding(dtype: torch.dtype, seed: int) -> None:
    """A block of a constant decodes to that constant, rounded to the type of x."""
    near_16_bits = random_bits(1000, seed).to(dtype).to(torch.float32).view(torch.int32)
    offset = torch.randint(-2, 3, (1000,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    values = torch.cat((near_16_bits + offset, near_16_bits + half + offset)).view(torch.float32)
    values = torch.where(values.abs() < 2.0**126, values, 1.0)
    index = torch.arange(len(values))
    table = torch.stack((index, torch.ones_like(index), 8 * index, 8 * len(values) + index), dim=1)
    wire = torch.cat((values.repeat_interleave(2).view(torch.uint8), torch.zeros(len(values), dtype=torch.uint8)))

    decoded = decoded_by_both(wire, table, dtype)

    assert_same_values(decoded[: len(values)] + 0.0, values.to(dtype) + 0.0)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_instruction_set(name: str) -> None:
    best = torch.backends.cpu.get_cpu_capability().lower()
    if name not in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1 if best in INSTRUCTION_SETS else 1]:
        pytest.skip(f"this CPU has no {name}: its best is {best}")
    if name == OPS.cpu_instruction_set():
        return  # the tests of this very process use it
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "bytes or chosen", __file__]

    finished = subprocess.run(
        command, env={**os.environ, "ATEN_CPU_CAPABILITY": name}, capture_output=True, text=True, timeout=120
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout


def test_chosen_instruction_set() -> None:
    expected = os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability().lower())
    assert OPS.cpu_instruction_set() == (expected if expected in INSTRUCTION_SETS else "default")


@several
@given(lengths_of_blocks, st.sampled_from(("scaled", "finite bits", "offset", "one sign", "subnormal")), seeds)
def test_error_bound(lengths: list[int], kind: str, seed: int) -> None:
    table, wire_bytes = lay_out(lengths, seed)
    x = hostile_values(kind, num_elements(table), seed)
    x = torch.where(x.abs() < 2.0**126, x, 1.0)
    decoded = decoded_by_both(encoded_by_both(x, table, wire_bytes), table, torch.float32)

    for start, length, *_ in table.tolist():
        exact, got = (tensor[start : start + length].double() for tensor in (x, decoded))
        step = (exact.max() - exact.min()) / 255
        bound = torch.maximum(step / 2 + 2.0**-23 * exact.abs().max(), torch.tensor(2.0**-118))
        assert (got - exact).abs().max() <= bound
        assert (got[exact == 0] == 0).all(), "a zero is exact"


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_are_exact(dtype: torch.dtype) -> None:
    table, wire_bytes = lay_out([L] * 6)
    x = torch.zeros(num_elements(table), dtype=dtype)
    tiny, huge = torch.finfo(dtype).tiny, min(torch.finfo(dtype).max, 2.0**125)
    for (start, length, *_), value in zip(table.tolist(), (0.0, -0.0, 1.1, -3e-5, tiny, -huge), strict=True):
        x[start : start + length] = value

    decoded = decoded_by_both(encoded_by_both(x, table, wire_bytes), table, dtype)

    for start, length, *_ in table.tolist():
        assert torch.equal(decoded[start : start + length], x[start : start + length])


def header_bytes(low: float, high: float) -> Tensor:
    return torch.tensor([low, high]).view(torch.uint8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**126, -(2.0**126)])
def test_a_value_that_cannot_be_coded_shows_in_its_block_alone(value: float) -> None:
    table, wire_bytes = lay_out([L, L])
    (start, _, header, payload), other = table.tolist()
    x = torch.linspace(-1, 1, num_elements(table))
    x[start + 17] = value

    wire = encoded_by_both(x, table, wire_bytes)

    assert torch.equal(wire[header : header + HEADER_BYTES], header_bytes(torch.nan, torch.nan))
    assert not wire[payload : payload + L].any()
    decoded = decoded_by_both(wire, table, torch.float32)
    assert decoded[start : start + L].isnan().all()
    assert decoded[other[0] : other[0] + L].isfinite().all()


@pytest.mark.parametrize(
    ("low", "high"),
    [(torch.nan, 1.0), (1.0, torch.nan), (-torch.inf, 1.0), (0.0, torch.inf), (1.0, 2.0**126), (1.0, 0.5)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_header_that_no_encoder_writes_decodes_to_nan(low: float, high: float, dtype: torch.dtype) -> None:
    table, wire_bytes = lay_out([L])
    start, _, header, _ = table[0].tolist()
    wire = torch.arange(wire_bytes).to(torch.uint8)
    wire[header : header + HEADER_BYTES] = header_bytes(low, high)

    assert decoded_by_both(wire, table, dtype)[start : start + L].isnan().all()
    mean = mean_by_both(torch.stack((wire, wire)), table, 2.0)
    assert torch.equal(mean[header : header + HEADER_BYTES], header_bytes(torch.nan, torch.nan))


def test_opcheck() -> None:
    table, wire_bytes = lay_out([L, 1, L + 1])
    x = hostile_values("scaled", num_elements(table), 38)
    wire = encoded_by_both(x, table, wire_bytes)
    torch.library.opcheck(OPS.minmax_uint8_encode.default, (x, table, wire))
    torch.library.opcheck(OPS.minmax_uint8_decode.default, (wire, table, x))
    torch.library.opcheck(OPS.minmax_uint8_decode_mean_encode.default, (wire.repeat(3, 1), table, 3.0, wire))
