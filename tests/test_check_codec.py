"""check_codec passes every codec of the package and of the docs, and finds codecs that break the contract."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from documentation import names_in
from test_codecs_everywhere import Sixteenths
from test_compressors import COMPRESSORS
from torchbagua.codecs import BlockCodec, Compressor, WireLayout
from torchbagua.codecs.base import REGISTRY
from torchbagua.testing import CodecFault, check_codec

FewLargest = names_in("extend/codec.md", "class FewLargest", module=__name__)["FewLargest"]
del REGISTRY["few_largest"]  # other tests list the registered names


@pytest.mark.parametrize("codec", [*COMPRESSORS, Sixteenths(), FewLargest(64, num_kept=5)], ids=repr)
def test_codecs_that_keep_the_contract(codec: Compressor) -> None:
    assert len(check_codec(codec)) == 9


@dataclass(frozen=True)
class Sizes:
    """A scale of four bytes for each block, and a byte for each element."""

    missing_bytes: int
    header_bytes: int = 4

    def payload_bytes(self, lengths: torch.Tensor) -> torch.Tensor:
        return (lengths - self.missing_bytes).clamp(min=0)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return 4 * num_blocks + num_elements


@dataclass(frozen=True)
class Scaled(BlockCodec):
    """Eight bits an element, scaled by the largest magnitude of a block; a subclass or an option breaks it."""

    block: int = 16
    missing_bytes: int = 0

    @property
    def block_format(self) -> Sizes:
        return Sizes(self.missing_bytes)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        for start, length, header, payload in layout.table.tolist():
            block = x_N[start : start + length].float()
            scale = block.abs().max() / 127
            wire_W[header : header + 4] = scale.reshape(1).view(torch.uint8)
            codes = (block / (scale if scale > 0 else 1.0)).round().nan_to_num(0.0).to(torch.int8)
            wire_W[payload : payload + length] = codes.view(torch.uint8)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        for start, length, header, payload in layout.table.tolist():
            scale = wire_W[header : header + 4].clone().view(torch.float32)
            x_N[start : start + length] = wire_W[payload : payload + length].view(torch.int8) * scale


class WritesX(Scaled):
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N, layout, wire_W)
        x_N.add_(1)


class WritesWireInDecode(Scaled):
    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        super().decode(wire_W, layout, x_N)
        wire_W.zero_()


class Draws(Scaled):
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N + torch.rand_like(x_N), layout, wire_W)


class AddsToMemory(Scaled):
    """Accumulates into the memory that it gets."""

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        before = x_N.nan_to_num()
        super().decode(wire_W, layout, x_N)
        x_N += before


class LeavesShortBlocks(Scaled):
    """Writes no payload of a block of one element."""

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        before = wire_W.clone()
        super().encode(x_N, layout, wire_W)
        for _, length, _, payload in layout.table.tolist():
            if length == 1:
                wire_W[payload] = before[payload]


class BeyondTheWire(Scaled):
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N, layout, wire_W)
        torch.as_strided(wire_W, (len(wire_W) + 1,), (1,))[-1] = 1


class BeyondX(Scaled):
    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        super().decode(wire_W, layout, x_N)
        torch.as_strided(x_N, (len(x_N) + 1,), (1,))[-1] = 1


class Unpadded(Scaled):
    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return self.block_format.most_bytes(num_elements, num_blocks)


class OtherLayout(Scaled):
    """Lays out 32 bytes more than it promises."""

    def layout(self, *arguments: Any, **named: Any) -> WireLayout:
        layout = super().layout(*arguments, **named)
        return replace(layout, byte_slices=tuple(slice(each.start, each.stop + 32) for each in layout.byte_slices))


class OverrunsItsMost(Scaled):
    """Blocks take more bytes than the largest size that it promises."""

    @property
    def block_format(self) -> Sizes:
        return Sizes(-16)


class OneScale(Scaled):
    """Scales all blocks of a chunk alike, but says that they are independent."""

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode((x_N.abs().max() * 0.1).clamp(max=2) + x_N, layout, wire_W)


class CutsNaN(Scaled):
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N.nan_to_num(0.0, 0.0, 0.0), layout, wire_W)


class RefusesLarge(Scaled):
    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        if (x_N.abs() > 1e5).any():
            raise ValueError("too large")
        super().encode(x_N, layout, wire_W)


class DividesByRows(Scaled):
    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        super().decode_mean(wires_RW, layout, len(wires_RW), x_N)


class SumsBackwards(Scaled):
    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        super().decode_mean(wires_RW.flip(0), layout, divisor, x_N)


class EncodesSum(Scaled):
    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        super().decode_mean_encode(wires_RW, layout, 1.0, wire_W)


class ForgetsResidual(Scaled):
    def encode_feedback(self, x_N: Any, residual_N: Any, layout: Any, wire_W: Any, left_out_N: Any) -> None:
        super().encode_feedback(x_N, residual_N * 0, layout, wire_W, left_out_N)


class KeepsOldResidual(Scaled):
    def encode_feedback(self, x_N: Any, residual_N: Any, layout: Any, wire_W: Any, left_out_N: Any) -> None:
        super().encode_feedback(x_N, residual_N, layout, wire_W, left_out_N)
        left_out_N.copy_(residual_N)


class ForgetsResidualOfMean(Scaled):
    def decode_mean_encode_feedback(
        self, wires_RW: Any, layout: Any, divisor: Any, residual_N: Any, wire_W: Any, left_out_N: Any, memory_N: Any
    ) -> None:
        super().decode_mean_encode_feedback(wires_RW, layout, divisor, residual_N * 0, wire_W, left_out_N, memory_N)


class RoundsTwice(Scaled):
    """Rounds to bfloat16 on the way to float16."""

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        decoded = torch.empty(x_N.shape)
        super().decode(wire_W, layout, decoded)
        x_N.copy_(decoded.bfloat16() if x_N.dtype == torch.float16 else decoded)


@dataclass(frozen=True)
class UsesStart(Scaled):
    """Adds the number of an element to it, counted in the chunk."""

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N + torch.arange(len(x_N)), layout, wire_W)


class NotFrozen(Scaled):
    __hash__ = None  # type: ignore[assignment]  # as of a dataclass that is not frozen


@dataclass(frozen=True)
class HasAnObject(Scaled):
    made: object = field(default_factory=object)


class EncodesNothing(Scaled):
    def encodes(self, dtype: torch.dtype) -> bool:
        return False


OVERLAP = "with other values in elements .* alone; if block_format.payload_bytes is too small"


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (HasAnObject, "description", "deepcopy: expected an equal codec .* frozen dataclass"),
        (NotFrozen, "description", "hash: expected no error, got TypeError: unhashable type"),
        (EncodesNothing, "description", "encodes: expected at least one of torch.float32, .* got none"),
        (Unpadded, "sizes", r"wire_bytes\(1, 1, torch.float32\): expected a multiple of 32, got 5; round up"),
        (OtherLayout, "sizes", r"layout: expected 32 bytes, as wire_bytes\(1, 1, torch.float32\) returns"),
        (OverrunsItsMost, "sizes", "layout of .* got ValueError: OverrunsItsMost: block_format.most_bytes must be at"),
        (WritesX, "same_values", "encode of parameters of .*: expected x_N not to change"),
        (WritesWireInDecode, "same_values", "decode of .*: expected wire_W not to change"),
        (Draws, "same_values", "encode of .*, again: expected the same wire"),
        (AddsToMemory, "same_values", "again, into memory full of 0x5a"),
        (LeavesShortBlocks, "same_values", "again, into memory full of 0xff"),
        (BeyondTheWire, "same_values", "encode of .*: the memory around wire_W: expected it not to change"),
        (BeyondX, "same_values", "decode of .*: the memory around x_N: expected it not to change"),
        (lambda: Scaled(missing_bytes=1), "blocks", OVERLAP),
        (OneScale, "blocks", OVERLAP),
        (UsesStart, "chunks", "encoded alone and decoded alone: expected"),
        (RoundsTwice, "dtypes", "into torch.float16: expected"),
        (CutsNaN, "not_finite", r"with nan at element 0: expected NaN or Inf in elements 0 to 0, got none"),
        (RefusesLarge, "not_finite", "encode of .*: expected no error, got ValueError: too large"),
        (DividesByRows, "mean", "decode_mean of 4 wires of .*, divided by 1: expected"),
        (SumsBackwards, "mean", "decode_mean of 3 wires of .*, divided by 3: expected"),
        (EncodesSum, "mean", "decode_mean_encode of 2 wires of .*, divided by 2: expected"),
        (ForgetsResidual, "feedback", "encode_feedback of .*: expected"),
        (KeepsOldResidual, "feedback", "encode_feedback of .*: left_out_N: expected"),
        (ForgetsResidualOfMean, "feedback", "decode_mean_encode_feedback of 2 wires of .*: expected"),
    ],
)
def test_codecs_that_break_the_contract(make: Callable[[], Compressor], check: str, message: str) -> None:
    with pytest.raises(CodecFault, match=f"^torchbagua: check '{check}' of .* failed: .*{message}"):
        check_codec(make())


def test_the_broken_codecs_are_broken_by_their_changes_alone() -> None:
    check_codec(Scaled())


def test_only_codecs_are_checked() -> None:
    with pytest.raises(TypeError, match=r"check_codec: codec must be a torchbagua.codecs.Compressor, got 'topk'"):
        check_codec("topk")  # type: ignore[arg-type]
