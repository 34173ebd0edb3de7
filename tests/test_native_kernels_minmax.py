"""The kernels of the min-max codecs keep the bounds of their formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_codecs import (
    DTYPES,
    MINMAX_UINT4,
    MINMAX_UINT8,
    Codec,
    L,
    assert_header_decodes_to_nan,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    hostile_values,
    lay_out,
    lengths_of_blocks,
    num_elements,
    random_bits,
    seeds,
    several,
)


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    return MINMAX_UINT8.on(device)


@pytest.fixture(scope="module")
def four_bits(device: torch.device) -> Codec:
    return MINMAX_UINT4.on(device)


def bounds_of(wire: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return minimum and maximum of MinMaxUInt4's headers, [B, 2] float64."""
    headers = wire[table[:, 2:3] + torch.arange(4)]
    return headers.view(torch.bfloat16).double()


@several
@given(
    lengths_of_blocks, st.sampled_from(("scaled", "finite bits", "offset", "one sign", "subnormal", "constant")), seeds
)
def test_error_bound_of_four_bits(four_bits: Codec, lengths: list[int], kind: str, seed: int) -> None:
    table, wire_bytes = lay_out(four_bits, lengths, seed)
    x = hostile_values(kind, num_elements(table), seed)
    x = torch.where(x.abs() < 2.0**125, x, 1.0)
    wire = encoded_by_both(four_bits, x, table, wire_bytes)
    decoded = decoded_by_both(four_bits, wire, table, torch.float32)

    for (start, length, *_), (low, high) in zip(table.tolist(), bounds_of(wire, table), strict=True):
        exact, got = (tensor[start : start + length].double() for tensor in (x, decoded))
        for bound, extreme in ((low, exact.min()), (high, exact.max())):
            assert (bound - extreme).abs() <= torch.maximum(2.0**-7 * extreme.abs(), torch.tensor(2.0**-133))
        assert low <= exact.min()
        assert high >= exact.max()
        largest = torch.maximum((high - low) / 30 + 2.0**-23 * exact.abs().max(), torch.tensor(2.0**-118))
        assert (got - exact).abs().max() <= largest
        assert (got[exact == 0] == 0).all(), "a zero is exact"


def test_headers_of_four_bits(four_bits: Codec) -> None:
    """Blocks of a single bfloat16 value are exact; a magnitude above every bfloat16 below 2^126 is not encoded."""
    most = 2.0**126 - 2.0**118
    values = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 2.0**-133, most, -most, torch.nextafter(torch.tensor(most), torch.tensor(torch.inf))]
    )
    table, wire_bytes = lay_out(four_bits, [3] * len(values))
    x = torch.zeros(num_elements(table))
    for (start, length, *_), value in zip(table.tolist(), values, strict=True):
        x[start : start + length] = value

    decoded = decoded_by_both(four_bits, encoded_by_both(four_bits, x, table, wire_bytes), table, torch.float32)

    expected = torch.where(values.abs() <= most, values, torch.nan)
    for (start, length, *_), value in zip(table.tolist(), expected, strict=True):
        assert_same_values(decoded[start : start + length] + 0.0, value.repeat(length) + 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bytes_of_every_16_bit_value(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    index = torch.arange(len(x))
    table = torch.stack((index, torch.ones_like(index), 8 * index, 8 * len(x) + index), dim=1)

    wire = encoded_by_both(codec, x, table, 9 * len(x))

    headers = wire[: 8 * len(x)].view(torch.float32).view(-1, 2)
    as_float = x.to(torch.float32) + 0.0
    usable = as_float.abs() < 2.0**126
    assert_same_values(headers[:, 0].contiguous(), torch.where(usable, as_float, torch.nan))


@several
@given(st.sampled_from((torch.bfloat16, torch.float16)), seeds)
def test_same_bytes_of_rounding(codec: Codec, dtype: torch.dtype, seed: int) -> None:
    """A block of a constant decodes to that constant, rounded to the dtype of x."""
    near_16_bits = random_bits(1000, seed).to(dtype).to(torch.float32).view(torch.int32)
    offset = torch.randint(-2, 3, (1000,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    values = torch.cat((near_16_bits + offset, near_16_bits + half + offset)).view(torch.float32)
    values = torch.where(values.abs() < 2.0**126, values, 1.0)
    index = torch.arange(len(values))
    table = torch.stack((index, torch.ones_like(index), 8 * index, 8 * len(values) + index), dim=1)
    wire = torch.cat((values.repeat_interleave(2).view(torch.uint8), torch.zeros(len(values), dtype=torch.uint8)))

    decoded = decoded_by_both(codec, wire, table, dtype)

    assert_same_values(decoded[: len(values)] + 0.0, values.to(dtype) + 0.0)


@several
@given(lengths_of_blocks, st.sampled_from(("scaled", "finite bits", "offset", "one sign", "subnormal")), seeds)
def test_error_bound(codec: Codec, lengths: list[int], kind: str, seed: int) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed)
    x = hostile_values(kind, num_elements(table), seed)
    x = torch.where(x.abs() < 2.0**126, x, 1.0)
    decoded = decoded_by_both(codec, encoded_by_both(codec, x, table, wire_bytes), table, torch.float32)

    for start, length, *_ in table.tolist():
        exact, got = (tensor[start : start + length].double() for tensor in (x, decoded))
        step = (exact.max() - exact.min()) / 255
        bound = torch.maximum(step / 2 + 2.0**-23 * exact.abs().max(), torch.tensor(2.0**-118))
        assert (got - exact).abs().max() <= bound
        assert (got[exact == 0] == 0).all(), "a zero is exact"


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_are_exact(codec: Codec, dtype: torch.dtype) -> None:
    table, wire_bytes = lay_out(codec, [L] * 6)
    x = torch.zeros(num_elements(table), dtype=dtype)
    tiny, huge = torch.finfo(dtype).tiny, min(torch.finfo(dtype).max, 2.0**125)
    for (start, length, *_), value in zip(table.tolist(), (0.0, -0.0, 1.1, -3e-5, tiny, -huge), strict=True):
        x[start : start + length] = value

    decoded = decoded_by_both(codec, encoded_by_both(codec, x, table, wire_bytes), table, dtype)

    for start, length, *_ in table.tolist():
        assert torch.equal(decoded[start : start + length], x[start : start + length])


@pytest.mark.parametrize("value", [2.0**126, -(2.0**126)])
def test_a_magnitude_that_is_too_large_makes_its_block_nan(codec: Codec, value: float) -> None:
    table, wire_bytes = lay_out(codec, [L])
    x = torch.linspace(-1, 1, num_elements(table))
    start = int(table[0, 0])
    x[start + 17] = value

    wire = encoded_by_both(codec, x, table, wire_bytes)

    assert decoded_by_both(codec, wire, table, torch.float32)[start : start + L].isnan().all()


@pytest.mark.parametrize(
    ("low", "high"),
    [(torch.nan, 1.0), (1.0, torch.nan), (-torch.inf, 1.0), (0.0, torch.inf), (1.0, 2.0**126), (1.0, 0.5)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_header_that_no_encoder_writes_decodes_to_nan(
    codec: Codec, low: float, high: float, dtype: torch.dtype
) -> None:
    assert_header_decodes_to_nan(codec, [low, high], dtype)
