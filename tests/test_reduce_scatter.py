"""Reduce-scatter and all-gather separately, with given cuts, as with FSDP2."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from oracle import ordered_sum, quantise
from ranks import run_ranks
from torchbagua.codecs import Compressor, Identity, MinMaxUInt8, TensorSpec
from torchbagua.collectives.mean import RankChunks, all_gather, reduce_scatter

BLOCK = 16
ROW = (100, 1, 37)  # the elements that each rank owns of three parameters


def apply_codec(compressor: Compressor, x: np.ndarray) -> np.ndarray:
    rows = x.reshape(-1, sum(ROW))
    return rows if isinstance(compressor, Identity) else np.stack([quantise(row, ROW, BLOCK) for row in rows])


def spec_of(num_rows: int) -> TensorSpec:
    return TensorSpec(ROW * num_rows, torch.float32, torch.device("cpu"), "layer 0")


@pytest.mark.parametrize(
    ("size", "compressor"), [(1, Identity()), (1, MinMaxUInt8(BLOCK)), (3, Identity()), (3, MinMaxUInt8(BLOCK))]
)
def test_each_rank_gets_the_mean_of_its_own_row_and_all_ranks_get_all_rows(size: int, compressor: Compressor) -> None:
    values = torch.randn(size, size * sum(ROW), generator=torch.Generator().manual_seed(0))
    spec, cuts = spec_of(size), [rank * sum(ROW) for rank in range(size + 1)]

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        own = tb.BaguaProcessGroup(group)
        chunks = RankChunks(own.world, compressor, spec, cuts)
        mean, rows = torch.full((sum(ROW),), torch.nan), torch.full((spec.num_elements,), torch.nan)
        for _ in range(2):
            reduce_scatter(chunks, values[group.rank()].clone(), mean, divisor=3.0)
            all_gather(chunks, values[group.rank(), : sum(ROW)].contiguous(), rows)
        own.close()
        return mean, rows

    decoded = [apply_codec(compressor, row) for row in values.numpy()]
    expected_rows = apply_codec(compressor, values[:, : sum(ROW)].numpy()).reshape(-1)
    for rank, (mean, rows) in enumerate(run_ranks(size, body)):
        expected = ordered_sum([rows[rank] for rows in decoded]) / np.float32(3)
        assert torch.equal(mean, torch.from_numpy(expected))
        assert torch.equal(rows, torch.from_numpy(expected_rows))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([0, 8, 276], r"the cuts of layer 0 must lie between its blocks, got 8, which is within a block"),
        ([0, 138, 200], r"the cuts of layer 0 must ascend from 0 to its 276 elements, got \[0, 138, 200\]"),
        ([0, 276, 138], "must ascend"),
        ([], "must ascend"),
    ],
)
def test_invalid_cuts_are_refused(cuts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MinMaxUInt8(BLOCK).layout(spec_of(2), cuts)


def test_rows_can_be_of_equal_length() -> None:
    spec = TensorSpec((100, 10), torch.float32, torch.device("cpu"), "x")
    layout = MinMaxUInt8(BLOCK).layout(spec, [0, 96, 110], equal_bytes=True)
    unequal = MinMaxUInt8(BLOCK).layout(spec, [0, 96, 110])
    assert [row.stop - row.start for row in unequal.byte_slices] == [160, 32]
    assert [row.stop - row.start for row in layout.byte_slices] == [160, 160]
    x, decoded = torch.arange(110.0), torch.empty(110)
    for tested in (layout, unequal):
        wire = torch.zeros(tested.num_bytes, dtype=torch.uint8)
        MinMaxUInt8(BLOCK).encode(x, tested, wire)
        MinMaxUInt8(BLOCK).decode(wire, tested, decoded)
        assert torch.equal(decoded, torch.from_numpy(quantise(x.numpy(), (100, 10), BLOCK)))
