"""The kernels of RandomK keep what its formula promises."""

import pytest
import torch

import oracle
from native_codecs import (
    DTYPES,
    RANDOMK,
    Codec,
    L,
    assert_header_decodes_to_nan,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    feedback_by_both,
    hostile_values,
)
from torchbagua.native.randomk import philox


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    return RANDOMK.on(device)


def test_random_numbers_are_those_of_philox() -> None:
    """Known answers of the paper's library, Random123: of zeros, which has two counters here."""
    zeros = ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert [f"{word:08x}" for word in oracle.philox(0, 0)] == zeros
    keys = [0, -1, 2**63 - 1, -(2**63), 123456789 << 32]
    words = philox(torch.tensor(keys)[:, None], 11)
    assert [f"{word:08x}" for word in words[0, :4].tolist()] == zeros
    for key, own in zip(keys, words.tolist(), strict=True):
        assert own == [word for counter in range(3) for word in oracle.philox(key % 2**64, counter)][:11]


def test_bytes_are_the_largest_kept_magnitude_then_values(codec: Codec) -> None:
    x = torch.arange(1.0, 9.0)
    table = torch.tensor([[0, 8, 0, 4, 3, 7]])
    places = oracle.drawn_places(8, 3, 7)
    wire = encoded_by_both(codec, x, table, 4 + 3)
    largest = float(wire[:4].view(torch.float32))
    assert largest == x[places].max()
    assert wire[4:].tolist() == [round(127 * value / largest) + 128 for value in x[places].tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_decoded_bytes_are_those_of_the_oracle(codec: Codec, dtype: torch.dtype, share: float) -> None:
    for length in (1, 2, 7, 100, 2047, 2048, 4096):
        kept, key = max(1, round(share * length)), 2**62 + length
        table = torch.tensor([[0, length, 0, 4, kept, key]])
        for kind in ("scaled", "zeros", "one not finite", "subnormal"):
            x = torch.cat((hostile_values(kind, length, length), torch.zeros(3))).to(dtype)
            wire = encoded_by_both(codec, x, table, 4 + kept)
            decoded = decoded_by_both(codec, wire, table, torch.float32)[:length]
            places = oracle.drawn_places(length, kept, key)
            assert_same_values(decoded, torch.from_numpy(oracle.in_8_bits(x[:length].float().numpy(), places)))


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, 2.0**126, -1.0, -0.0])
def test_a_header_that_no_encoder_writes_decodes_to_nan(codec: Codec, largest: float) -> None:
    assert_header_decodes_to_nan(codec, [largest], torch.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**126])
def test_what_cannot_be_coded_shows_though_it_is_not_drawn(codec: Codec, value: float) -> None:
    table = torch.tensor([[0, L, 0, 4, 3, 99]])
    (place, *_) = set(range(L)) - set(oracle.drawn_places(L, 3, 99).tolist())
    x, residual = torch.linspace(-1, 1, L + 3), torch.zeros(L + 3)
    residual[place] = value
    wire, left_out = feedback_by_both(codec, x, residual, table, 4 + 3)
    assert decoded_by_both(codec, wire, table, torch.float32)[:L].isnan().all()
    assert left_out[:L].isnan().all()
