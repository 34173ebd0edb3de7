"""Compressors: their layouts, the sizes that they promise, and what comes back."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from torchbagua.compressors import Cast, Compressor, Identity, MinMaxUInt8, by_name
from torchbagua.compressors.blocks import block_bounds, deal_blocks

COMPRESSORS: list[Compressor] = [
    MinMaxUInt8(),
    MinMaxUInt8(block=None),
    MinMaxUInt8(8),
    Cast(),
    Cast("float16"),
    Identity(),
]
BLOCK = 2048


def layout_of(compressor: Compressor, segments: Sequence[int], num_chunks: int, dtype: torch.dtype = torch.float32):
    bounds = block_bounds(segments, compressor.granularity)
    return compressor.layout(bounds, deal_blocks(bounds, num_chunks), dtype, torch.device("cpu"))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 9))
def test_blocks_are_dealt_whole_and_in_order(segments: list[int], block: int, num_chunks: int) -> None:
    bounds = block_bounds(segments, block)
    lengths = bounds.diff()
    assert bounds[0] == 0
    assert bounds[-1] == sum(segments)
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= block)
    assert set(np.cumsum(segments)) <= set(bounds.tolist()), "a block crosses a parameter's boundary"
    cuts = deal_blocks(bounds, num_chunks)
    assert cuts[0] == 0
    assert cuts[-1] == len(bounds) - 1
    assert cuts == sorted(cuts)
    sizes = bounds[cuts].diff()
    assert len(sizes) == num_chunks
    assert (sizes - sum(segments) / num_chunks).abs().max() <= block


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("num_elements", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_wire_bytes_is_what_layout_uses(compressor: Compressor, num_elements: int, num_chunks: int) -> None:
    bounds = block_bounds([num_elements], compressor.granularity)
    cuts = deal_blocks(bounds, num_chunks)
    layout = compressor.layout(bounds, cuts, torch.float32, torch.device("cpu"))
    for chunk in range(num_chunks):
        length = int(bounds[cuts[chunk + 1]] - bounds[cuts[chunk]])
        promised = compressor.wire_bytes(length, cuts[chunk + 1] - cuts[chunk], torch.float32)
        row = layout.rows[chunk]
        assert row.stop - row.start == promised
        if not compressor.in_place:
            assert row.start % 32 == 0
        start, length_, header, payload = layout.table[slice(*layout.chunk_blocks[chunk : chunk + 2])].T
        assert torch.all((header >= row.start) & (payload + length_ <= row.stop))
        assert torch.all((start >= layout.elements[chunk].start) & (start + length_ <= layout.elements[chunk].stop))
    assert layout.num_bytes == sum(row.stop - row.start for row in layout.rows)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(compressor: Compressor, dtype: torch.dtype) -> None:
    segments, num_chunks = [5000, 1, 333], 3
    x = torch.randn(sum(segments), generator=torch.Generator().manual_seed(0)).to(dtype)
    layout = layout_of(compressor, segments, num_chunks, dtype)
    wire = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    decoded = torch.full_like(x, float("nan"))
    compressor.encode(x, layout, wire)
    compressor.decode(wire, layout, decoded)
    if isinstance(compressor, Identity):
        assert torch.equal(decoded, x)
    elif isinstance(compressor, Cast):
        wire_dtype = torch.bfloat16 if compressor.dtype == "bfloat16" else torch.float16
        assert torch.equal(decoded, x.to(wire_dtype).to(dtype))
    elif compressor.block is not None:
        expected = oracle.quantise(x.float().numpy(), segments, compressor.block)
        assert torch.equal(decoded, torch.from_numpy(expected).to(dtype))
    else:
        for chunk in layout.elements:
            expected = oracle.quantise_block(x[chunk].float().numpy())
            assert torch.equal(decoded[chunk], torch.from_numpy(expected).to(dtype))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 70), st.booleans())
def test_decode_mean_encode_is_the_mean_of_what_decode_gives(num_rows: int, length: int, average: bool) -> None:
    rows = torch.randn(num_rows, length, generator=torch.Generator().manual_seed(length))
    divisor = float(num_rows) if average else 1.0
    for compressor in COMPRESSORS:
        layout = layout_of(compressor, [length], 1)
        wires = torch.zeros(num_rows, layout.num_bytes, dtype=torch.uint8)
        decoded = torch.empty_like(rows)
        for row, wire, out in zip(rows, wires, decoded, strict=True):
            compressor.encode(row, layout, wire)
            compressor.decode(wire, layout, out)
        expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        mean = torch.from_numpy(oracle.ordered_sum(list(decoded.numpy())) / np.float32(divisor))
        compressor.encode(mean, layout, expected)
        fused = torch.zeros_like(expected)
        compressor.decode_mean_encode(wires, layout, divisor, fused)
        assert torch.equal(fused, expected), compressor


def test_zero_length_layout_decodes_nothing() -> None:
    for compressor in COMPRESSORS:
        layout = layout_of(compressor, [0], 2)
        assert layout.num_bytes == 0
        empty = torch.zeros(0)
        compressor.encode(empty, layout, empty.view(torch.uint8))
        compressor.decode(empty.view(torch.uint8), layout, empty)


@pytest.mark.parametrize("block", [0, 7, 4, 12, -8])
def test_bad_block(block: int) -> None:
    with pytest.raises(ValueError, match=rf"MinMaxUInt8: block must be None or a multiple of 8.*got {block}"):
        MinMaxUInt8(block)


@pytest.mark.parametrize("block", [8.0, "8", True])
def test_bad_block_type(block: object) -> None:
    with pytest.raises(TypeError, match="MinMaxUInt8: block must be an int or None"):
        MinMaxUInt8(block)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"one of \['MinMaxUInt8', 'bfloat16', 'float16'\], got 'uint4'"):
        by_name("uint4")
    with pytest.raises(ValueError, match="Cast: dtype must be one of"):
        Cast("float8")
