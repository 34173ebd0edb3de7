"""check_codec passes every codec of the package and of the docs, and finds codecs that break the contract."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
    """Eight bits an element, scaled by the largest magnitude of a block; a change or an option breaks it."""

    block: int = 16
    missing_bytes: int = 0
    made: object = None

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


def broken(name: str, **changes: Any) -> Compressor:
    """Return a Scaled whose methods and attributes `changes` replace; methods get the original as first argument."""

    def method(change: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda codec, *arguments: change(partial(original, codec), *arguments)

    for key, change in changes.items():
        changes[key] = method(change, getattr(Scaled, key)) if callable(change) else change
    return dataclass(frozen=True)(type(name, (Scaled,), changes))()


def writes_x(encode: Any, x_N: torch.Tensor, *rest: Any) -> None:
    encode(x_N, *rest)
    x_N.add_(1)


def writes_wire(decode: Any, wire_W: torch.Tensor, *rest: Any) -> None:
    decode(wire_W, *rest)
    wire_W.zero_()


def adds_to_memory(decode: Any, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
    before = x_N.nan_to_num()
    decode(wire_W, layout, x_N)
    x_N += before


def leaves_short_blocks(encode: Any, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
    before = wire_W.clone()
    encode(x_N, layout, wire_W)
    for _, length, _, payload in layout.table.tolist():
        if length == 1:
            wire_W[payload] = before[payload]


def writes_beyond(method: Any, source: torch.Tensor, layout: WireLayout, target: torch.Tensor) -> None:
    method(source, layout, target)
    torch.as_strided(target, (len(target) + 1,), (1,))[-1] = 1


def lays_out_more(layout_of: Any, *arguments: Any) -> WireLayout:
    layout = layout_of(*arguments)
    return replace(layout, byte_slices=tuple(slice(each.start, each.stop + 32) for each in layout.byte_slices))


def refuses_large(encode: Any, x_N: torch.Tensor, *rest: Any) -> None:
    if (x_N.abs() > 1e5).any():
        raise ValueError("too large")
    encode(x_N, *rest)


def rounds_twice(decode: Any, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
    decode(wire_W, layout, decoded := torch.empty(x_N.shape))
    x_N.copy_(decoded.bfloat16() if x_N.dtype == torch.float16 else decoded)


def keeps_old_residual(encode_feedback: Any, x_N: Any, residual_N: Any, *rest: Any) -> None:
    encode_feedback(x_N, residual_N, *rest)
    rest[-1].copy_(residual_N)


def encodes(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda encode, x_N, *rest: encode(change(x_N), *rest)


OVERLAP = "with other values in elements .* alone; if block_format.payload_bytes is too small"


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        (
            {"made": field(default_factory=object), "__annotations__": {"made": object}},
            "description",
            "deepcopy: expected an equal codec .* frozen dataclass",
        ),
        ({"__hash__": None, "__eq__": None}, "description", "hash: expected no error, got TypeError: unhashable type"),
        ({"encodes": lambda *_: False}, "description", "encodes: expected at least one of torch.float32, .* got none"),
        (
            {"wire_bytes": lambda _, n, num_blocks, dtype: 4 * num_blocks + n},
            "sizes",
            r"wire_bytes\(1, 1, torch.float32\): expected a multiple of 32, got 5; round up",
        ),
        (
            {"layout": lays_out_more},
            "sizes",
            r"layout: expected 32 bytes, as wire_bytes\(1, 1, torch.float32\) returns",
        ),
        (
            {"block_format": Sizes(-16)},
            "sizes",
            "layout of .* got ValueError: Broken: block_format.most_bytes must be at",
        ),
        ({"encode": writes_x}, "same_values", "encode of parameters of .*: expected x_N not to change"),
        ({"decode": writes_wire}, "same_values", "decode of .*: expected wire_W not to change"),
        (
            {"encode": encodes(lambda x_N: x_N + torch.rand_like(x_N))},
            "same_values",
            "encode of .*, again: expected the same wire",
        ),
        ({"decode": adds_to_memory}, "same_values", "again, into memory full of 0x5a"),
        ({"encode": leaves_short_blocks}, "same_values", "again, into memory full of 0xff"),
        ({"encode": writes_beyond}, "same_values", "encode of .*: the memory around wire_W: expected it not to change"),
        ({"decode": writes_beyond}, "same_values", "decode of .*: the memory around x_N: expected it not to change"),
        ({"block_format": Sizes(1)}, "blocks", OVERLAP),
        # It scales all blocks of a chunk alike.
        ({"encode": encodes(lambda x_N: (x_N.abs().max() * 0.1).clamp(max=2) + x_N)}, "blocks", OVERLAP),
        # It adds the number of an element, counted in the chunk.
        (
            {"encode": encodes(lambda x_N: x_N + torch.arange(len(x_N)))},
            "chunks",
            "encoded alone and decoded alone: expected",
        ),
        ({"decode": rounds_twice}, "dtypes", "into torch.float16: expected"),
        (
            {"encode": encodes(lambda x_N: x_N.nan_to_num(0.0, 0.0, 0.0))},
            "not_finite",
            r"with nan at element 0: expected NaN or Inf in elements 0 to 0, got none",
        ),
        ({"encode": refuses_large}, "not_finite", "encode of .*: expected no error, got ValueError: too large"),
        (
            {"decode_mean": lambda mean, wires_RW, layout, divisor, x_N: mean(wires_RW, layout, len(wires_RW), x_N)},
            "mean",
            "decode_mean of 4 wires of .*, divided by 1: expected",
        ),
        (
            {"decode_mean": lambda mean, wires_RW, *rest: mean(wires_RW.flip(0), *rest)},
            "mean",
            "decode_mean of 3 wires of .*, divided by 3: expected",
        ),
        (
            {"decode_mean_encode": lambda mean, wires_RW, layout, divisor, wire_W: mean(wires_RW, layout, 1.0, wire_W)},
            "mean",
            "decode_mean_encode of 2 wires of .*, divided by 2: expected",
        ),
        (
            {"encode_feedback": lambda encode, x_N, residual_N, *rest: encode(x_N, residual_N * 0, *rest)},
            "feedback",
            "encode_feedback of .*: expected",
        ),
        ({"encode_feedback": keeps_old_residual}, "feedback", "encode_feedback of .*: left_out_N: expected"),
        (
            {
                "decode_mean_encode_feedback": lambda mean, wires_RW, layout, divisor, residual_N, *rest: mean(
                    wires_RW, layout, divisor, residual_N * 0, *rest
                )
            },
            "feedback",
            "decode_mean_encode_feedback of 2 wires of .*: expected",
        ),
    ],
)
def test_codecs_that_break_the_contract(changes: dict[str, Any], check: str, message: str) -> None:
    with pytest.raises(CodecFault, match=f"^torchbagua: check '{check}' of .* failed: .*{message}"):
        check_codec(broken("Broken", **changes))


def test_the_broken_codecs_are_broken_by_their_changes_alone() -> None:
    check_codec(Scaled())


def test_only_codecs_are_checked() -> None:
    with pytest.raises(TypeError, match=r"check_codec: codec must be a torchbagua.codecs.Compressor, got 'topk'"):
        check_codec("topk")  # type: ignore[arg-type]
