"""The kernels of Sign1Bit compute its formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from native_codecs import (
    DTYPES,
    SIGN_1BIT,
    TILE,
    Codec,
    L,
    assert_header_decodes_to_nan,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    hostile_values,
    lay_out,
    mean_by_both,
    num_elements,
    seeds,
    several,
)


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    return SIGN_1BIT.on(device)


def encode_block(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode all of x as one block between other bytes; return its header and payload."""
    payload_bytes = codec.payload_bytes(len(x))
    table = torch.tensor([[0, len(x), 4, 9]])
    wire = torch.full((9 + payload_bytes + 4,), 255, dtype=torch.uint8)
    kernels = codec.kernels("encode")
    wires = [wire.clone() for _ in kernels]
    for encode, wire in zip(kernels, wires, strict=True):
        encode(x, table, wire)
    assert torch.equal(*wires)
    assert (wires[0][[0, 1, 2, 3, 8, -4, -3, -2, -1]] == 255).all()
    return wires[0][4:8].view(torch.float32), wires[0][9 : 9 + payload_bytes]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, L, TILE - 1, TILE + 33, 3 * TILE + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_the_mean_magnitude_and_the_sign_bits(codec: Codec, length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    x[::5] = -0.0
    values = x.float().numpy()

    header, payload = encode_block(codec, x)

    assert header.numpy() == oracle.mean_magnitude(values)
    # Each lane rounds length / 32 additions; five levels of the tree and a division follow.
    exact = np.abs(values.astype(np.float64)).mean()
    assert abs(float(header) - exact) <= exact * (length / 32 + 6) * 2.0**-24
    assert payload.tolist() == np.packbits(np.signbit(values), bitorder="little").tolist(), "unused bits are 0"


@several
@given(
    st.integers(1, 300), st.sampled_from(("scaled", "finite bits", "offset", "one sign", "subnormal", "zeros")), seeds
)
def test_decoded_bytes_are_sign_times_mean_magnitude(codec: Codec, length: int, kind: str, seed: int) -> None:
    table, wire_bytes = lay_out(codec, [length], seed)
    x = hostile_values(kind, num_elements(table), seed)
    start = int(table[0, 0])
    block = x[start : start + length]

    decoded = decoded_by_both(codec, encoded_by_both(codec, x, table, wire_bytes), table, torch.float32)

    assert_same_values(decoded[start : start + length], torch.from_numpy(oracle.sign_block(block.numpy())))


def test_mean_bytes_of_a_long_block_are_those_of_its_mean(codec: Codec) -> None:
    """The lanes' sums continue from tile to tile."""
    length = 2 * TILE + 77
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    table = torch.tensor([[0, length, 0, 4]])
    wire_bytes = 4 + codec.payload_bytes(length)
    wires = torch.stack([encoded_by_both(codec, row, table, wire_bytes) for row in rows])

    mean = mean_by_both(codec, wires, table, 3.0)

    values = oracle.ordered_sum([oracle.sign_block(row.numpy()) for row in rows]) / np.float32(3)
    assert torch.equal(mean, encoded_by_both(codec, torch.from_numpy(values), table, wire_bytes))
    assert mean[:4].view(torch.float32).numpy() == oracle.mean_magnitude(values)


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        ([2.0**126], False),
        ([-(2.0**126) * (1 - 2.0**-24)], True),
        ([2.0**127, 0.0], False),
        ([-(2.0**127), 0.0, 0.0], True),
        ([2.0**121] * L, False),  # the mean is small enough, but the sum overflows
        ([-(2.0**120)] * L, True),
    ],
)
def test_the_mean_of_a_block_must_be_in_range(codec: Codec, values: list[float], usable: bool) -> None:
    header, payload = encode_block(codec, torch.tensor(values))
    assert bool(header.isfinite()) == usable
    assert bool(payload.any()) == usable


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 2.0**126, -1.0, -0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_header_that_no_encoder_writes_decodes_to_nan(codec: Codec, scale: float, dtype: torch.dtype) -> None:
    assert_header_decodes_to_nan(codec, [scale], dtype)
