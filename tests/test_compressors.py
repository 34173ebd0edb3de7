"""Codecs: layouts, sizes, decoded values and names; test_check_codec.py checks the rest of their contract."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

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

COMPRESSORS: list[Compressor] = [
    *(codec(block) for codec in (MinMaxUInt8, MinMaxUInt4, Sign1Bit) for block in (codec().block, None, 8)),
    *(codec for kind in (TopK, BlockK) for codec in (kind(), kind(64, 0.07), kind(8, 1.0))),
    *(Cast(), Cast("float16"), Identity()),
]
BLOCK_CODECS = (MinMaxUInt8, MinMaxUInt4, Sign1Bit)
CODED = {
    MinMaxUInt8: oracle.quantise_block,
    MinMaxUInt4: oracle.quantise_block_4_bits,
    Sign1Bit: oracle.sign_block,
}


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


@settings(max_examples=30)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(compressor: Compressor, dtype: torch.dtype) -> None:
    segments, num_chunks = [5000, 1, 333, *[1] * 100], 3  # many blocks whose bytes are rounded up
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


def test_bits_of_an_element() -> None:
    """Half a byte of an odd length is rounded up."""
    layout = layout_of(MinMaxUInt4(), [128 * 1000, 5], 1)
    assert layout.table[-1].tolist() == [128 * 1000, 5, 4 * 1000, 4 * 1001 + 64 * 1000]
    assert 4.25 < 8 * layout.num_bytes / (128 * 1000 + 5) < 4.26
    for codec, most in ((Sign1Bit(), 1.02), (TopK(), 0.214), (MinMaxUInt8(), 8.032)):
        assert 8 * codec.wire_bytes(2048 * 1000, 1000, torch.float32) / 2048 / 1000 < most


def test_topk_takes_the_ratio_as_written() -> None:
    # 0.07 * 200 is 14.000000000000002.
    for block, ratio, kept in ((2048, 0.01, 21), (200, 0.07, 14), (2048, 1, 2048), (2048, 1e-9, 1)):
        assert TopK(block, ratio).block_format.kept == kept
    assert TopK(ratio=np.float64(0.01)).block_format.kept == 21


def test_names() -> None:
    assert by_name("minmax_uint4") == MinMaxUInt4()
    assert by_name("sign1bit") == Sign1Bit() != by_name("minmax_uint8") == MinMaxUInt8()
    assert all(f'"{name}"' in (codecs.__doc__ or "") for name in REGISTRY)
    # Bagua's spelling is an alias.
    assert check_compression("", "MinMaxUInt8") == "minmax_uint8"
    assert by_name("MinMaxUInt8", block=8) == MinMaxUInt8(8)
    assert not needs_feedback("MinMaxUInt8")
    with pytest.raises(ValueError, match="named 'MinMaxUInt8' is already registered"):
        register_compressor("MinMaxUInt8", MinMaxUInt4)


def refusals() -> Iterator[tuple[Callable[[], object], type[Exception], str]]:
    """Yield calls with an invalid argument, and their errors."""
    for codec in BLOCK_CODECS:
        name = codec.__name__
        for block in (0, 7, 4, 12, -8):
            yield partial(codec, block), ValueError, f"{name}: block must be None or a multiple of 8.*got {block}"
        for block in (8.0, "8", True):
            yield partial(codec, block), TypeError, f"{name}: block must be an int or None"
    for ratio in (0.0, -0.5, 1.01, float("nan"), float("inf")):
        yield partial(TopK, ratio=ratio), ValueError, f"TopK: ratio must be above 0 and at most 1, got {ratio}"
    for block in (0, 12, 4104):
        yield partial(TopK, block), ValueError, f"TopK: block must be a multiple of 8 from 8 to 4096, got {block}"
    yield partial(TopK, None), TypeError, "TopK: block must be an int, got None"
    yield partial(TopK, ratio="0.01"), TypeError, "TopK: ratio must be a number, got"
    yield partial(Cast, "float8"), ValueError, "Cast: dtype must be one of"
    known = "['bfloat16', 'blockk', 'float16', 'minmax_uint4', 'minmax_uint8', 'sign1bit', 'topk']"
    for name in ("uint4", "MinMaxUInt4"):
        yield partial(by_name, name), ValueError, f".* must be .* one of {re.escape(known)}, got '{name}'"
    yield partial(MeanCodecs, "topk"), TypeError, "MeanCodecs: codec must be a Compressor, got 'topk'"
    wrong = partial(MeanCodecs, Identity(), False)
    yield wrong, TypeError, "MeanCodecs: intra_codec must be a Compressor or None, got False"


def test_refusals() -> None:
    for call, kind, message in refusals():
        with pytest.raises(kind, match=f"^{message}"):
            call()


def test_the_codecs_of_a_mean_are_full_precision_for_dtypes_that_they_do_not_encode() -> None:
    eight, four = MinMaxUInt8(), MinMaxUInt4()
    assert MeanCodecs(eight, four).for_dtype(torch.float32) == MeanCodecs(eight, four)
    assert MeanCodecs(eight, four).for_dtype(torch.float64) == MeanCodecs(Identity(), Identity())
    assert MeanCodecs(eight).for_dtype(torch.float64) == MeanCodecs(Identity())  # not hierarchical either
    assert not MeanCodecs(eight).hierarchical
    assert MeanCodecs(eight, Identity()).hierarchical


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
    spec = TensorSpec((100, 1, 37) * 2, torch.float32, torch.device("cpu"), "layer 0")
    with pytest.raises(ValueError, match=message):
        MinMaxUInt8(16).layout(spec, cuts)


def test_rows_can_be_of_equal_length() -> None:
    spec = TensorSpec((100, 10), torch.float32, torch.device("cpu"), "x")
    layout, unequal = (MinMaxUInt8(16).layout(spec, [0, 96, 110], equal_bytes=is_equal) for is_equal in (True, False))
    assert [row.stop - row.start for row in unequal.byte_slices] == [160, 32]
    assert [row.stop - row.start for row in layout.byte_slices] == [160, 160]
    x, decoded = torch.arange(110.0), torch.empty(110)
    for tested in (layout, unequal):
        wire = torch.zeros(tested.num_bytes, dtype=torch.uint8)
        MinMaxUInt8(16).encode(x, tested, wire)
        MinMaxUInt8(16).decode(wire, tested, decoded)
        assert torch.equal(decoded, torch.from_numpy(oracle.quantise(x.numpy(), (100, 10), 16)))
