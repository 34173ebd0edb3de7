"""Codecs for the flat weights of many replicas, which encode and decode at once: the package's, and one of 2 bits."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchbagua.codecs.base import DEFAULT_BLOCK, TensorSpec, by_name
from torchbagua.codecs.topk import TopK

NARROWEST_RANGE = 2.0**-118
# The four levels with the smallest mean squared error for a normal distribution, and the threshold between them.
INNER_LEVEL, THRESHOLD, OUTER_LEVEL = 0.4528, 0.9816, 1.510


class RoundTrip:
    """Replaces values [..., N] by their decoded encoding. No block crosses the boundary of a parameter.

    Args:
        name: "minmax_uint8", "minmax_uint4", "sign1bit", "topk", "two_bits" or "two_bits_table".
        lengths: the number of elements of each parameter.
        ratio: the fraction of the elements that "topk" keeps.

    Attributes:
        wire_bytes: the size of the encoding of N elements.
    """

    def __init__(self, name: str, lengths: Sequence[int], ratio: float = 0.01) -> None:
        codec = None if name.startswith("two_bits") else TopK(ratio=ratio) if name == "topk" else by_name(name)
        self._quantize, block = {
            "minmax_uint8": (minmax_uint8, DEFAULT_BLOCK),
            "minmax_uint4": (minmax_uint4, 128),
            "sign1bit": (sign1bit, DEFAULT_BLOCK),
            "topk": (partial(topk, ratio=ratio), DEFAULT_BLOCK),
            "two_bits": (two_bits, 128),
            "two_bits_table": (two_bits_table, 128),
        }[name]
        self._runs = block_runs(lengths, block)
        if codec is None:
            header_bytes = 4 if name == "two_bits" else 8
            num_blocks = sum(count for _, count, _ in self._runs)
            self.wire_bytes = math.ceil(sum(lengths) / 4) + header_bytes * num_blocks
        else:
            spec = TensorSpec(tuple(lengths), torch.float32, torch.device("cpu"), "weights")
            self.wire_bytes = codec.layout(spec, (0, sum(lengths))).num_bytes

    def __call__(self, values: Tensor) -> Tensor:
        decoded = torch.empty_like(values, memory_format=torch.contiguous_format)
        for start, count, length in self._runs:
            columns = slice(start, start + count * length)
            blocks = values[..., columns].unflatten(-1, (count, length))
            decoded[..., columns].unflatten(-1, (count, length)).copy_(self._quantize(blocks))
        return decoded


def block_runs(lengths: Sequence[int], block: int) -> list[tuple[int, int, int]]:
    """Cut each parameter into blocks; return runs of equal blocks: their start, their number and their length."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for length in lengths:
        for count, size in ((length // block, block), (1, length % block)):
            if not count or not size:
                continue
            if runs and runs[-1][2] == size:
                first, before, _ = runs.pop()
                runs.append((first, before + count, size))
            else:
                runs.append((start, count, size))
            start += count * size
    return runs


def minmax_uint8(blocks: Tensor) -> Tensor:
    """Return MinMaxUInt8's decoded blocks; each is a row of the last dimension."""
    return _minmax(blocks, blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True), 255)


def minmax_uint4(blocks: Tensor) -> Tensor:
    """Return MinMaxUInt4's decoded blocks; their ranges are rounded outwards to bfloat16."""
    low = blocks.amin(-1, keepdim=True).view(torch.int32)
    high = blocks.amax(-1, keepdim=True).view(torch.int32)
    # Truncating the lower half of a float rounds toward zero; adding 0xffff first rounds away from zero.
    low = torch.where(low < 0, low + 0xFFFF, low) & -0x10000
    high = torch.where(high >= 0, high + 0xFFFF, high) & -0x10000
    return _minmax(blocks, low.view(torch.float32), high.view(torch.float32), 15)


def _minmax(blocks: Tensor, low: Tensor, high: Tensor, num_steps: int) -> Tensor:
    pivot = torch.zeros_like(low).clamp(low, high)
    span = high - low
    steps = torch.full_like(span, num_steps)
    is_narrow = span < NARROWEST_RANGE
    inverse = (steps / span).masked_fill(is_narrow, 0.0)
    step = (span / steps).masked_fill(is_narrow, 0.0)
    highest = ((high - pivot) * inverse).round()
    codes = ((blocks - pivot) * inverse).round().clamp(highest - steps, highest)
    return (pivot + codes * step).clamp(low, high)


def sign1bit(blocks: Tensor) -> Tensor:
    """Return Sign1Bit's decoded blocks, but with magnitudes that are summed in another order."""
    scale = blocks.abs().mean(-1, keepdim=True)
    return torch.where(blocks.view(torch.int32) < 0, -scale, scale)


def topk(blocks: Tensor, ratio: float) -> Tensor:
    """Return TopK's decoded blocks."""
    kept = TopK(ratio=ratio).block_format.kept
    num_kept = math.ceil(blocks.shape[-1] * kept / DEFAULT_BLOCK)
    indices = blocks.abs().topk(num_kept, sorted=False).indices
    magnitude = blocks.abs().amax(-1, keepdim=True)
    is_narrow = magnitude < NARROWEST_RANGE
    steps = torch.full_like(magnitude, 127)
    inverse = (steps / magnitude).masked_fill(is_narrow, 0.0)
    step = (magnitude / steps).masked_fill(is_narrow, 0.0)
    return torch.zeros_like(blocks).scatter_(-1, indices, (blocks.gather(-1, indices) * inverse).round() * step)


def _centered(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of each block in bfloat16, the differences from it, and their root mean square in bfloat16."""
    mean = blocks.mean(-1, keepdim=True).bfloat16().to(blocks.dtype)
    centered = blocks - mean
    deviation = centered.square().mean(-1, keepdim=True).sqrt().bfloat16().to(blocks.dtype)
    return mean, centered, deviation


def two_bits(blocks: Tensor) -> Tensor:
    """Encode in 2 bits, and a header of 4 bytes for each block of 128: its mean m and its deviation d, in bfloat16.

    With c = x - m, x' = m + sign(c) d L, with L = 0.4528 if |c| <= 0.9816 d, and 1.510 otherwise.
    """
    mean, centered, deviation = _centered(blocks)
    is_outer = centered.abs() > THRESHOLD * deviation
    level = (INNER_LEVEL + (OUTER_LEVEL - INNER_LEVEL) * is_outer) * deviation
    return mean + torch.where(centered < 0, -level, level)


def two_bits_table(blocks: Tensor) -> Tensor:
    """Encode in 2 bits, with the thresholds of `two_bits`, and a header of 8 bytes: the mean of each bin, in bfloat16.

    MuLoCo (arXiv 2505.23725) measures the means of its bins too, but of a row of a matrix, with the thresholds -2.25,
    -0.75 and 0.75 deviations.
    """
    _, centered, deviation = _centered(blocks)
    outer = centered.abs() > THRESHOLD * deviation
    decoded = torch.zeros_like(blocks)
    for is_outer in (outer, ~outer):
        for is_negative in (centered < 0, centered >= 0):
            member = (is_outer & is_negative).to(blocks.dtype)
            mean = (blocks * member).sum(-1, keepdim=True) / member.sum(-1, keepdim=True).clamp(min=1)
            decoded += member * mean.bfloat16().to(blocks.dtype)
    return decoded
