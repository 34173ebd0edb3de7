"""Codecs: layouts, promised sizes and decoded values."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from torchbagua import codecs
from torchbagua.codecs import (
    BlockK,
    Cast,
    Compressor,
    Identity,
    MeanCodecs,
    MinMaxUInt4,
    MinMaxUInt8,
    Sign1Bit,
    TensorSpec,
    TopK,
    register_compressor,
)
from torchbagua.codecs.base import REGISTRY, by_name, check_compression, needs_feedback
from torchbagua.codecs.sparse import SparseCodec

COMPRESSORS: list[Compressor] = [
    MinMaxUInt8(),
    MinMaxUInt8(block=None),
    MinMaxUInt8(8),
    MinMaxUInt4(),
    MinMaxUInt4(block=None),
    MinMaxUInt4(8),
    Sign1Bit(),
    Sign1Bit(block=None),
    Sign1Bit(8),
    TopK(),
    TopK(64, 0.07),
    TopK(8, 1.0),
    BlockK(),
    BlockK(64, 0.07),
    BlockK(8, 1.0),
    Cast(),
    Cast("float16"),
    Identity(),
]
BLOCK_CODECS = (MinMaxUInt8, MinMaxUInt4, Sign1Bit)
BlockCodecs = type[MinMaxUInt8 | MinMaxUInt4 | Sign1Bit]
CODED = {
    MinMaxUInt8: oracle.quantise_block,
    MinMaxUInt4: oracle.quantise_block_4_bits,
    Sign1Bit: oracle.sign_block,
}
ELEMENTS_PER_BYTE = {MinMaxUInt4: 2, Sign1Bit: 8}


def after_coding(compressor: Compressor) -> oracle.Coded:
    """Return the oracle of a block-wise codec: it maps a block to the block after encode and decode."""
    if isinstance(compressor, BlockK):
        return oracle.largest_run_of(compressor.block, compressor.block_format.kept)
    if isinstance(compressor, TopK):
        return oracle.largest_of(compressor.block, compressor.block_format.kept)
    return CODED[type(compressor)]


def spec_of(segments: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(tuple(segments), dtype, torch.device("cpu"), "a test")


def layout_of(compressor: Compressor, segments: Sequence[int], num_chunks: int, dtype: torch.dtype = torch.float32):
    spec = spec_of(segments, dtype)
    return compressor.layout(spec, spec.even_cuts(num_chunks, compressor.block_elements))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 9))
def test_chunks_have_whole_blocks_in_order(segments: list[int], block: int, num_chunks: int) -> None:
    spec = spec_of(segments)
    bounds = spec.block_bounds(block)
    lengths = bounds.diff()
    assert bounds[0] == 0
    assert bounds[-1] == sum(segments)
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= block)
    assert set(np.cumsum(segments)) <= set(bounds.tolist()), "a block crosses a parameter's boundary"
    cuts = spec.even_cuts(num_chunks, block)
    assert cuts[0] == 0
    assert cuts[-1] == sum(segments)
    assert set(cuts) <= set(bounds.tolist()), "a chunk begins within a block"
    sizes = torch.tensor(cuts).diff()
    assert (sizes >= 0).all()
    assert len(sizes) == num_chunks
    assert (sizes - sum(segments) / num_chunks).abs().max() <= block


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("num_blocks_and_elements", [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_wire_bytes_equals_the_layouts_size(
    compressor: Compressor, num_blocks_and_elements: tuple[int, int], num_chunks: int
) -> None:
    num_blocks, num_more = num_blocks_and_elements
    num_elements = num_blocks * compressor.block_elements + num_more
    spec = spec_of([num_elements])
    bounds = spec.block_bounds(compressor.block_elements).tolist()
    cuts = spec.even_cuts(num_chunks, compressor.block_elements)
    layout = compressor.layout(spec, cuts)
    for chunk, (first, last) in enumerate(itertools.pairwise(cuts)):
        num_blocks = bounds.index(last) - bounds.index(first)
        promised = compressor.wire_bytes(last - first, num_blocks, torch.float32)
        row = layout.byte_slices[chunk]
        assert row.stop - row.start == promised
        if not compressor.wire_is_tensor:
            assert row.start % 32 == 0
        start, length_, header, payload, *_ = layout.table[slice(*layout.chunk_blocks[chunk : chunk + 2])].T
        if isinstance(compressor, SparseCodec):
            payload_bytes = compressor.block_format.payload_bytes(length_)
        else:
            payload_bytes = -(-length_ // ELEMENTS_PER_BYTE.get(type(compressor), 1))
        assert torch.all((header >= row.start) & (payload + payload_bytes <= row.stop))
        assert torch.all(payload[1:] == (payload + payload_bytes)[:-1])
        assert torch.all((start >= layout.elements[chunk].start) & (start + length_ <= layout.elements[chunk].stop))
    assert layout.num_bytes == sum(row.stop - row.start for row in layout.byte_slices)


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
        expected = oracle.quantise(x.float().numpy(), segments, compressor.block, after_coding(compressor))
        assert torch.equal(decoded, torch.from_numpy(expected).to(dtype))
    else:
        for chunk in layout.elements:
            expected = after_coding(compressor)(x[chunk].float().numpy())
            assert torch.equal(decoded[chunk], torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_feedback_keeps_the_residual(compressor: Compressor) -> None:
    segments = [5000, 1, 333]
    x, residual = torch.randn(2, sum(segments), generator=torch.Generator().manual_seed(0))
    layout = layout_of(compressor, segments, 3)
    wire, expected = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    left_out, decoded = torch.full((2, sum(segments)), torch.nan)
    compressor.encode_feedback(x.clone(), residual, layout, wire, left_out)
    compressor.encode(x + residual, layout, expected)
    compressor.decode(wire, layout, decoded)
    assert torch.equal(wire, expected)
    assert torch.equal(left_out, (x + residual) - decoded)
    assert left_out.any() or isinstance(compressor, Identity)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_the_encoded_mean_is_the_encoding_of_the_float32_mean(compressor: Compressor) -> None:
    segments = [5000, 1, 333]
    layout = layout_of(compressor, segments, 1)
    values = torch.randn(4, sum(segments), generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(4, layout.num_bytes, dtype=torch.uint8)
    for row, x in zip(rows, values, strict=True):
        compressor.encode(x, layout, row)
    mean = torch.full_like(values[0], torch.nan)
    wire, expected = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    compressor.decode_mean(rows.clone(), layout, 4.0, mean)
    compressor.encode(mean, layout, expected)
    compressor.decode_mean_encode(rows.clone(), layout, 4.0, wire)
    assert torch.equal(wire, expected)
    assert torch.allclose(mean, values.mean(0), atol=5)

    left_out, expected_left_out, memory = torch.full((3, sum(segments)), torch.nan)
    compressor.encode_feedback(mean, values[0], layout, expected, expected_left_out)
    compressor.decode_mean_encode_feedback(rows, layout, 4.0, values[0], wire, left_out, memory)
    assert torch.equal(wire, expected)
    assert torch.equal(left_out, expected_left_out)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 7))
def test_decoded_values_do_not_depend_on_the_chunks(codec: BlockCodecs, segments: list[int], num_chunks: int) -> None:
    compressor = codec(16)
    x = torch.randn(sum(segments), generator=torch.Generator().manual_seed(0))
    x[0] = torch.nan
    decoded = []
    for chunks in (1, num_chunks):
        layout = layout_of(compressor, segments, chunks)
        wire = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
        compressor.encode(x, layout, wire)
        decoded.append(torch.empty_like(x))
        for chunk in range(chunks):
            alone = layout.chunk(chunk)
            compressor.decode(wire[layout.byte_slices[chunk]], alone, decoded[-1][layout.elements[chunk]])
    assert torch.equal(decoded[0].view(torch.int32), decoded[1].view(torch.int32))
    assert decoded[0][: min(16, segments[0])].isnan().all()
    assert decoded[0][16:].isfinite().all()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 7))
def test_sign1bit_takes_a_bit_an_element_and_four_bytes_a_block(segments: list[int], num_chunks: int) -> None:
    compressor = Sign1Bit(16)
    layout = layout_of(compressor, segments, num_chunks)
    needed = 4 * len(layout.table) + int((-(-layout.table[:, 1] // 8)).sum())
    assert needed <= layout.num_bytes < needed + len(layout.table) + 32 * num_chunks


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 70), st.booleans())
def test_decode_mean_encode_is_the_mean_of_the_decoded_values(num_rows: int, length: int, average: bool) -> None:
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


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("block", [0, 7, 4, 12, -8])
def test_bad_block(codec: BlockCodecs, block: int) -> None:
    with pytest.raises(ValueError, match=rf"{codec.__name__}: block must be None or a multiple of 8.*got {block}"):
        codec(block)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("block", [8.0, "8", True])
def test_bad_block_type(codec: BlockCodecs, block: object) -> None:
    with pytest.raises(TypeError, match=f"{codec.__name__}: block must be an int or None"):
        codec(block)


def test_four_bits_take_4_25_bits_an_element_and_half_a_byte_for_an_odd_length() -> None:
    layout = layout_of(MinMaxUInt4(), [128 * 1000, 5], 1)
    assert layout.table[-1].tolist() == [128 * 1000, 5, 4 * 1000, 4 * 1001 + 64 * 1000]
    assert 4.25 < 8 * layout.num_bytes / (128 * 1000 + 5) < 4.26
    # 1.0, 4/15 and 0 of the range from 0 to 1, the first in the lower half; 0x3f80 is 1 in bfloat16.
    layout = layout_of(MinMaxUInt4(), [3], 1)
    wire = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    MinMaxUInt4().encode(torch.tensor([1.0, 4 / 15, 0.0]), layout, wire)
    assert wire[:6].tolist() == [0, 0, 0x80, 0x3F, 0x4F, 0x00]


@pytest.mark.parametrize("codec", [TopK, BlockK])
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 64), st.integers(1, 7))
def test_a_sparse_codec_keeps_the_same_share_of_every_block(
    codec: Callable[..., SparseCodec], segments: list[int], kept: int, num_chunks: int
) -> None:
    compressor = codec(64, kept / 64)
    layout = layout_of(compressor, segments, num_chunks)
    lengths, num_kept = layout.table[:, 1].tolist(), layout.table[:, 4].tolist()
    assert num_kept == [-(-length * kept // 64) for length in lengths]
    index_bytes = [-(-k * (n - 1).bit_length() // 8) for k, n in zip(num_kept, lengths, strict=True)]
    if codec is BlockK:
        index_bytes = [2] * len(lengths)
    needed = sum(4 + bytes_ + k for k, bytes_ in zip(num_kept, index_bytes, strict=True))
    assert needed <= layout.num_bytes
    if set(lengths) == {64}:
        assert layout.num_bytes < needed + 32 * num_chunks
    x = torch.randn(sum(segments), generator=torch.Generator().manual_seed(0))
    wire, decoded = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.empty_like(x)
    compressor.encode(x, layout, wire)
    for chunk, elements in enumerate(layout.elements):
        compressor.decode(wire[layout.byte_slices[chunk]], layout.chunk(chunk), decoded[elements])
    assert torch.equal(
        decoded, torch.from_numpy(oracle.quantise(x.numpy(), segments, compressor.block, after_coding(compressor)))
    )


def test_topk_takes_the_ratio_as_written() -> None:
    assert TopK(ratio=0.01).block_format.kept == 21
    assert TopK(200, 0.07).block_format.kept == 14  # 0.07 * 200 is 14.000000000000002
    assert TopK(ratio=1).block_format.kept == 2048
    assert TopK(ratio=1e-9).block_format.kept == 1
    assert TopK(ratio=np.float64(0.01)).block_format.kept == 21
    assert 8 * TopK().wire_bytes(2048 * 1000, 1000, torch.float32) / 2048 / 1000 < 0.214


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_topk_bad_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"^TopK: ratio must be above 0 and at most 1, got {ratio}"):
        TopK(ratio=ratio)


def test_topk_bad_arguments() -> None:
    for block in (0, 12, 4104):
        with pytest.raises(ValueError, match=f"^TopK: block must be a multiple of 8 from 8 to 4096, got {block}"):
            TopK(block)
    with pytest.raises(TypeError, match=r"^TopK: block must be an int, got None"):
        TopK(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^TopK: ratio must be a number, got"):
        TopK(ratio="0.01")  # type: ignore[arg-type]


def test_names() -> None:
    assert by_name("minmax_uint4") == MinMaxUInt4()
    assert by_name("sign1bit") == Sign1Bit()
    assert by_name("minmax_uint8") == MinMaxUInt8()
    assert by_name("minmax_uint8") != Sign1Bit()
    assert all(f'"{name}"' in (codecs.__doc__ or "") for name in REGISTRY)


def test_baguas_spelling_is_an_alias() -> None:
    assert check_compression("", "MinMaxUInt8") == "minmax_uint8"
    assert by_name("MinMaxUInt8", block=8) == MinMaxUInt8(8)
    assert not needs_feedback("MinMaxUInt8")
    with pytest.raises(ValueError, match="named 'MinMaxUInt8' is already registered"):
        register_compressor("MinMaxUInt8", MinMaxUInt4)


def test_unknown_names() -> None:
    with pytest.raises(
        ValueError,
        match=r"one of \['bfloat16', 'blockk', 'float16', 'minmax_uint4', 'minmax_uint8', 'sign1bit', 'topk'\], got 'u",
    ):
        by_name("uint4")
    with pytest.raises(ValueError, match=r"one of .*'minmax_uint4', .*got 'MinMaxUInt4'"):
        by_name("MinMaxUInt4")
    with pytest.raises(ValueError, match="Cast: dtype must be one of"):
        Cast("float8")


def test_the_codecs_of_a_mean_are_full_precision_for_dtypes_that_they_do_not_encode() -> None:
    eight, four = MinMaxUInt8(), MinMaxUInt4()
    assert MeanCodecs(eight, four).for_dtype(torch.float32) == MeanCodecs(eight, four)
    assert MeanCodecs(eight, four).for_dtype(torch.float64) == MeanCodecs(Identity(), Identity())
    assert MeanCodecs(eight).for_dtype(torch.float64) == MeanCodecs(Identity())  # not hierarchical either
    assert not MeanCodecs(eight).hierarchical
    assert MeanCodecs(eight, Identity()).hierarchical


def test_the_codecs_of_a_mean_are_compressors() -> None:
    with pytest.raises(TypeError, match="MeanCodecs: codec must be a Compressor, got 'minmax_uint8'"):
        MeanCodecs("minmax_uint8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MeanCodecs: intra_codec must be a Compressor or None, got False"):
        MeanCodecs(Identity(), False)  # type: ignore[arg-type]
