"""The codecs' native kernels give the bytes of the reference, on the CPU and, in tests marked `gpu`, on a GPU.

The tests here and in test_native_kernels_*.py with `bytes` in their names run again with every other instruction set
that this CPU has.
"""

import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import programs
from native_codecs import (
    CODECS,
    DTYPES,
    KINDS,
    OPS,
    TILE,
    Codec,
    L,
    assert_mean_feedback_is_both_in_turn,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    feedback_by_both,
    hostile_values,
    lay_out,
    lengths_of_blocks,
    mean_by_both,
    num_elements,
    seeds,
    several,
)
from torchbagua import native

INSTRUCTION_SETS = ("default", "avx2", "avx512")


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest, device: torch.device) -> Codec:
    return request.param.on(device)


@several
@given(lengths_of_blocks, st.sampled_from(KINDS), st.sampled_from(DTYPES), seeds)
def test_same_bytes_for_any_values(codec: Codec, lengths: list[int], kind: str, dtype: torch.dtype, seed: int) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed)
    x = hostile_values(kind, num_elements(table), seed).to(dtype)

    wire = encoded_by_both(codec, x, table, wire_bytes, seed)

    decoded_by_both(codec, wire, table, dtype)


@several
@given(st.lists(st.floats(width=32), min_size=1, max_size=12), st.sampled_from(DTYPES))
def test_same_bytes_for_few_values(codec: Codec, values: list[float], dtype: torch.dtype) -> None:
    table, wire_bytes = lay_out(codec, [len(values)])
    x = torch.zeros(num_elements(table), dtype=dtype)
    x[int(table[0, 0]) :][: len(values)] = torch.tensor(values).to(dtype)

    decoded_by_both(codec, encoded_by_both(codec, x, table, wire_bytes), table, dtype)


@several
@given(lengths_of_blocks, st.integers(1, 5), st.sampled_from(DTYPES), seeds)
def test_same_bytes_from_any_wire(
    codec: Codec, lengths: list[int], num_rows: int, dtype: torch.dtype, seed: int
) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (num_rows, wire_bytes), dtype=torch.uint8, generator=generator)

    decoded_by_both(codec, rows[0], table, dtype)
    mean_by_both(codec, rows, table, float(num_rows))


@several
@given(lengths_of_blocks, st.integers(1, 5), st.sampled_from(KINDS), st.floats(2.0**-10, 2.0**10, width=32), seeds)
def test_same_bytes_of_a_mean(
    codec: Codec, lengths: list[int], num_rows: int, kind: str, divisor: float, seed: int
) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed)
    rows = torch.stack(
        [
            encoded_by_both(codec, hostile_values(kind, num_elements(table), seed + row), table, wire_bytes)
            for row in range(num_rows)
        ]
    )

    wire = mean_by_both(codec, rows, table, divisor)

    total = decoded_by_both(codec, rows[0], table, torch.float32)
    for row in rows[1:]:
        total = total + decoded_by_both(codec, row, table, torch.float32)
    mean = torch.div(total, torch.full_like(total, divisor))
    for decode_mean in codec.kernels("decode_mean"):
        own_mean = torch.full_like(mean, 7.0)
        decode_mean(rows, table, divisor, own_mean)
        for start, length, *_ in table.tolist():
            assert_same_values(own_mean[start : start + length], mean[start : start + length])
    again = torch.full_like(wire, 7)
    codec.kernels("encode")[1](mean, table, again)
    assert torch.equal(wire, again), "the fused operation is decode, sum in row order, divide, encode"


@several
@given(lengths_of_blocks, st.sampled_from(KINDS), st.sampled_from(KINDS), seeds)
def test_same_bytes_with_feedback(codec: Codec, lengths: list[int], kind: str, residual_kind: str, seed: int) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed)
    x = hostile_values(kind, num_elements(table), seed)
    residual = hostile_values(residual_kind, num_elements(table), seed + 1)

    wire, left_out = feedback_by_both(codec, x, residual, table, wire_bytes)

    again = torch.full_like(wire, 7)
    codec.kernels("encode")[1](x + residual, table, again)
    assert torch.equal(wire, again), "the fused operation is add, encode, decode, subtract"
    decoded = decoded_by_both(codec, wire, table, torch.float32)
    for start, length, *_ in table.tolist():
        block = slice(start, start + length)
        assert_same_values(left_out[block], (x + residual)[block] - decoded[block])
    rows = torch.stack((wire, encoded_by_both(codec, residual, table, wire_bytes, seed)))
    assert_mean_feedback_is_both_in_turn(codec, rows, x, table)


@pytest.mark.parametrize("length", [TILE, TILE + 1, 3 * TILE + 5, 50_000])
def test_same_bytes_of_blocks_longer_than_a_tile(codec: Codec, length: int) -> None:
    length = min(length, codec.longest)
    table, wire_bytes = lay_out(codec, [length, 100, length])
    values = [hostile_values("scaled", num_elements(table), seed) for seed in (38, 39, 40)]
    values[0][int(table[0, 0]) + length - 1] = 1e6  # an extreme that only the last tile of the block has

    rows = torch.stack([encoded_by_both(codec, x, table, wire_bytes) for x in values])

    decoded_by_both(codec, mean_by_both(codec, rows, table, 3.0), table, torch.float32)
    means = [torch.zeros_like(values[0]) for _ in range(2)]
    for decode_mean, mean in zip(codec.kernels("decode_mean"), means, strict=True):
        decode_mean(rows, table, 3.0, mean)
    assert_same_values(*means)
    feedback_by_both(codec, values[0], values[1], table, wire_bytes)
    assert_mean_feedback_is_both_in_turn(codec, rows, values[0], table)


def test_same_bytes_at_any_address(codec: Codec) -> None:
    """Blocks in a codec's dense layout, of tensors that begin anywhere between two aligned addresses."""
    lengths = torch.tensor([2 * L, L + 5, 1, 3 * L])
    payload_bytes = torch.tensor([codec.payload_bytes(length) for length in lengths.tolist()])
    header = codec.header_bytes * torch.arange(len(lengths))
    payload = codec.header_bytes * len(lengths) + payload_bytes.cumsum(0) - payload_bytes
    dense = torch.stack((lengths.cumsum(0) - lengths, lengths, header, payload), dim=1)
    table = torch.tensor([codec.row(*fields) for fields in dense.tolist()])
    wire_bytes = int(payload[-1] + payload_bytes[-1])
    shifts = list(product((0, 1, 3, 7), (0, 1, 4, 15)))
    # All pairs with float32; with the other dtypes every shift of both.
    of_16_bits = [(dtype, *pair) for dtype in DTYPES[1:] for pair in shifts[::5]]
    for dtype, x_shift, wire_shift in [*((torch.float32, *pair) for pair in shifts), *of_16_bits]:
        x = hostile_values("scaled", x_shift + int(lengths.sum()), 38).to(dtype)[x_shift:]
        wires = [torch.full((wire_shift + wire_bytes,), 7, dtype=torch.uint8)[wire_shift:] for _ in range(2)]
        decoded = [torch.full((x_shift + len(x),), 7.0, dtype=dtype)[x_shift:] for _ in range(2)]

        for encode, wire in zip(codec.kernels("encode"), wires, strict=True):
            encode(x, table, wire)
        for decode, into in zip(codec.kernels("decode"), decoded, strict=True):
            decode(wires[1], table, into)

        assert torch.equal(*wires)
        assert_same_values(*decoded)
        mean_by_both(codec, wires[0].repeat(3, 1), table, 3.0)
        values = x.float()
        feedback_by_both(codec, values, values.flip(0), table, wire_bytes)
        assert_mean_feedback_is_both_in_turn(codec, wires[0].repeat(3, 1), values, table)


@pytest.mark.release
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_instruction_set(name: str) -> None:
    best = torch.backends.cpu.get_cpu_capability().lower()
    if name not in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1 if best in INSTRUCTION_SETS else 1]:
        pytest.skip(f"this CPU has no {name}: its best is {best}")
    native.load()
    if name == OPS.cpu_instruction_set():
        return  # the tests of this process use it
    files = sorted(map(str, Path(__file__).parent.glob("test_native_kernels*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "bytes or chosen", *files]

    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": name})


def test_chosen_instruction_set() -> None:
    native.load()
    expected = os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability().lower())
    assert OPS.cpu_instruction_set() == (expected if expected in INSTRUCTION_SETS else "default")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_cannot_be_coded_shows_in_its_block_alone(codec: Codec, value: float) -> None:
    table, wire_bytes = lay_out(codec, [L, L])
    (start, _, header, payload, *_), other = table.tolist()
    x = torch.linspace(-1, 1, num_elements(table))
    x[start + 17] = value

    wire = encoded_by_both(codec, x, table, wire_bytes)

    assert wire[header : header + codec.header_bytes].view(torch.float32).isnan().all()
    assert not wire[payload : payload + codec.payload_bytes(L)].any()
    decoded = decoded_by_both(codec, wire, table, torch.float32)
    assert decoded[start : start + L].isnan().all()
    assert decoded[other[0] : other[0] + L].isfinite().all()


def test_opcheck(codec: Codec) -> None:
    table, wire_bytes = lay_out(codec, [L, 1, L + 1])
    x = hostile_values("scaled", num_elements(table), 38)
    wire = encoded_by_both(codec, x, table, wire_bytes)
    codec.opcheck("encode", x, table, wire)
    codec.opcheck("decode", wire, table, x)
    codec.opcheck("decode_mean", wire.repeat(3, 1), table, 3.0, x)
    codec.opcheck("decode_mean_encode", wire.repeat(3, 1), table, 3.0, wire)
    codec.opcheck("encode_feedback", x, x.flip(0), table, wire, torch.zeros_like(x))
    codec.opcheck("decode_mean_encode_feedback", wire.repeat(3, 1), table, 3.0, x, wire, torch.zeros_like(x))
