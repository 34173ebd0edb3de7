"""The kernels of TopK compute its formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from native_codecs import (
    DTYPES,
    KINDS,
    TOPK,
    Codec,
    L,
    assert_header_decodes_to_nan,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    hostile_values,
    lay_out,
    mean_by_both,
    seeds,
    several,
)
from torchbagua.native.topk import index_bits


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    return TOPK.on(device)


def table_of_block(length: int, kept: int) -> tuple[Tensor, int]:
    """Return the table of a single block without gaps in the wire, and the bytes of its indices."""
    return torch.tensor([[0, length, 0, 4, kept]]), -(-kept * index_bits(length) // 8)


def test_bytes_are_the_largest_magnitude_then_indices_then_values(codec: Codec) -> None:
    x = torch.tensor([0.0, -2.0, 1.0, 254.0, 2.0, -2.0, 0.5, 1.0, 0.0])
    table, index_bytes = table_of_block(9, 3)
    wire = encoded_by_both(codec, x, table, 4 + index_bytes + 3)
    assert wire[:4].view(torch.float32) == 254
    # Four bits an index. Among equal magnitudes the first elements are kept.
    assert wire[4:6].tolist() == [0x31, 0x04]
    assert wire[6:].tolist() == [127, 255, 129]
    decoded = decoded_by_both(codec, wire, table, torch.float32)
    assert decoded[:9].tolist() == [0, -2, 0, 254, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_decoded_bytes_are_those_of_the_oracle(codec: Codec, dtype: torch.dtype, share: float) -> None:
    for length in (1, 2, 7, 100, 2047, 2048, 4096):
        kept = max(1, round(share * length))
        table, index_bytes = table_of_block(length, kept)
        for kind in ("scaled", "constant", "zeros", "one not finite", "offset", "subnormal"):
            x = torch.cat((hostile_values(kind, length, length), torch.zeros(3))).to(dtype)
            wire = encoded_by_both(codec, x, table, 4 + index_bytes + kept)
            decoded = decoded_by_both(codec, wire, table, torch.float32)[:length]
            assert_same_values(decoded, torch.from_numpy(oracle.largest_of_block(x[:length].float().numpy(), kept)))


@several
@given(st.integers(1, 300), st.sampled_from(KINDS), st.integers(0, 10**9), seeds)
def test_same_bytes_from_spoiled_wires(codec: Codec, length: int, kind: str, spoiled: int, seed: int) -> None:
    """Bytes that no encoder writes decode to NaN, or to values at other places of the block."""
    table, wire_bytes = lay_out(codec, [length, 2 * length], seed)
    x = hostile_values(kind, int((table[:, 0] + table[:, 1]).max()), seed)
    wire = encoded_by_both(codec, x, table, wire_bytes)
    wire[spoiled % wire_bytes] ^= 1 << spoiled % 7
    decoded_by_both(codec, wire, table, torch.float32)
    mean_by_both(codec, torch.stack((wire, wire)), table, 2.0)


@pytest.mark.parametrize("indices", [[0, 0, 0], [1, 0, 2], [0, 2, 2], [7, 8, 9], [0, 1, 9], [13, 14, 15]])
def test_indices_that_do_not_ascend_within_the_block_decode_to_nan(codec: Codec, indices: list[int]) -> None:
    table, _ = table_of_block(9, 3)
    wire = torch.tensor([0, 0, 128, 63, indices[0] | indices[1] << 4, indices[2], 200, 100, 255]).to(torch.uint8)
    decoded = decoded_by_both(codec, wire, table, torch.float32)[:9]
    assert decoded.isnan().all()
    wire[4], wire[5] = 0x76, 8
    assert (decoded_by_both(codec, wire, table, torch.float32)[:9] != 0).tolist() == [False] * 6 + [True] * 3


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, 2.0**126, -1.0, -0.0])
def test_a_header_that_no_encoder_writes_decodes_to_nan(codec: Codec, largest: float) -> None:
    assert_header_decodes_to_nan(codec, [largest], torch.float32)


def test_a_magnitude_that_is_too_large_makes_its_block_nonfinite(codec: Codec) -> None:
    table, index_bytes = table_of_block(L, 3)
    for value, is_good in ((2.0**126, False), (-(2.0**126) * (1 - 2.0**-24), True)):
        x = torch.linspace(-1, 1, L + 3)
        x[5] = value
        wire = encoded_by_both(codec, x, table, 4 + index_bytes + 3)
        assert bool(decoded_by_both(codec, wire, table, torch.float32)[:L].isfinite().all()) == is_good
