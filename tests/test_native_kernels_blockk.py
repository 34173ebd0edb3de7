"""The kernels of BlockK follow its formula."""

import pytest
import torch

import oracle
from native_codecs import (
    BLOCKK,
    DTYPES,
    Codec,
    assert_header_decodes_to_nan,
    assert_same_values,
    decoded_by_both,
    encoded_by_both,
    hostile_values,
    mean_by_both,
)


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    return BLOCKK.on(device)


@pytest.mark.parametrize(
    ("values", "run", "kept"),
    [
        ([1, 0, 0, 5, -4, 3, 0, 6], 1, [0, 0, 0, 5, -4, 3, 0, 0]),
        ([3, 0, 4, 0, 0, -5, 0, 0], 0, [3, 0, 4, 0, 0, 0, 0, 0]),  # equal sums: the first run
        ([0, 0, 0, 0, 0, 0, 0, 2], 2, [0, 0, 0, 0, 0, 0, 0, 2]),  # the last run begins at 5
        ([0, 0, 0, 0, 0, 0, 0, 0], 0, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_bytes_are_the_largest_magnitude_then_the_run_then_values(
    codec: Codec, values: list[int], run: int, kept: list[int]
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    table = torch.tensor([[0, 8, 0, 4, 3]])
    wire = encoded_by_both(codec, x, table, 4 + 2 + 3)
    assert wire[:4].view(torch.float32) == max(map(abs, kept))
    assert wire[4:6].tolist() == [run, 0]
    decoded = decoded_by_both(codec, wire, table, torch.float32)
    assert (decoded[:8] - torch.tensor(kept)).abs().max() <= max(map(abs, kept)) / 254
    assert torch.equal(decoded[:8] != 0, torch.tensor(kept) != 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 1.0])
def test_decoded_bytes_are_those_of_the_oracle(codec: Codec, dtype: torch.dtype, share: float) -> None:
    for length in (1, 2, 7, 100, 2047, 2048, 4096):
        kept = max(1, round(share * length))
        table = torch.tensor([[0, length, 0, 4, kept]])
        for kind in ("scaled", "constant", "zeros", "one not finite", "subnormal"):
            x = torch.cat((hostile_values(kind, length, length), torch.zeros(3))).to(dtype)
            wire = encoded_by_both(codec, x, table, 4 + 2 + kept)
            decoded = decoded_by_both(codec, wire, table, torch.float32)[:length]
            assert_same_values(decoded, torch.from_numpy(oracle.largest_run_of_block(x[:length].float().numpy(), kept)))


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, 2.0**126, -1.0, -0.0])
def test_a_header_that_no_encoder_writes_decodes_to_nan(codec: Codec, largest: float) -> None:
    assert_header_decodes_to_nan(codec, [largest], torch.float32)


def test_a_run_outside_of_the_block_decodes_to_nan(codec: Codec) -> None:
    table = torch.tensor([[0, 8, 0, 4, 3]])
    for run in (0, 2, 3, 255, 256, 65535):
        wire = torch.tensor([0, 0, 128, 63, run % 256, run // 256, 200, 100, 255]).to(torch.uint8)
        assert bool(decoded_by_both(codec, wire, table, torch.float32)[:8].isnan().all()) == (run > 2)
        mean_by_both(codec, wire.repeat(2, 1), table, 2.0)
