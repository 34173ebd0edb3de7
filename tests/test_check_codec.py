"""check_codec passes every codec of the package and of the docs, and finds codecs that break the contract."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import torchbagua as tb
from documentation import names_in
from test_codecs_everywhere import Sixteenths
from test_compressors import COMPRESSORS
from torchbagua.codecs import BlockCodec, Compressor, WireLayout, register_compressor
from torchbagua.codecs.base import REGISTRY, by_name
from torchbagua.testing import CodecFault, check_codec

FewLargest = names_in("extend/codec.md", "class FewLargest", module=__name__)["FewLargest"]
REGISTERED = REGISTRY.pop("few_largest")  # other tests list the registered names


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

    @property
    def block_format(self) -> Sizes:
        return Sizes(0)

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


def broken(**changes: Any) -> Compressor:
    """Return a Scaled with other methods and attributes; a method gets the original as its first argument."""

    def method(change: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda codec, *arguments: change(partial(original, codec), *arguments)

    for key, change in changes.items():
        changes[key] = method(change, getattr(Scaled, key)) if callable(change) else change
    return type("Broken", (Scaled,), changes)()


def encodes(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda encode, x_N, *rest: encode(change(x_N), *rest)


def writes_x(encode: Any, x_N: torch.Tensor, *rest: Any) -> None:
    encode(x_N, *rest)
    x_N.add_(1)


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


def forgets_residual(mean: Any, wires_RW: Any, layout: Any, divisor: Any, residual_N: Any, *rest: Any) -> None:
    mean(wires_RW, layout, divisor, residual_N * 0, *rest)


DRAWS, CUTS_NAN = encodes(lambda x_N: x_N + torch.rand_like(x_N)), encodes(lambda x_N: x_N.nan_to_num(0.0, 0.0, 0.0))
USES_START = encodes(lambda x_N: x_N + torch.arange(len(x_N)))
ONE_SCALE = encodes(lambda x_N: (x_N.abs().max() * 0.1).clamp(max=2) + x_N)  # for all blocks of a chunk
OVERLAP = "with other values in elements .* alone; if block_format.payload_bytes is too small"


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"__hash__": None}, "description", "hash: expected no error, got TypeError: unhashable type"),
        ({"wire_bytes": lambda *_: 5}, "sizes", r"wire_bytes\(1, 1, torch.float32\): expected a multiple of 32, got 5"),
        ({"block_format": Sizes(-16)}, "sizes", "layout of .* got ValueError: Broken: block_format.most_bytes must"),
        ({"encode": writes_x}, "same_values", "encode of parameters of .*: expected x_N not to change"),
        ({"encode": DRAWS}, "same_values", "encode of .*, again: expected the same wire"),
        ({"decode": adds_to_memory}, "same_values", "again, into memory full of 0x5a"),
        ({"encode": leaves_short_blocks}, "same_values", "again, into memory full of 0xff"),
        ({"encode": writes_beyond}, "same_values", "encode of .*: the memory around wire_W: expected it not"),
        ({"decode": writes_beyond}, "same_values", "decode of .*: the memory around x_N: expected it not"),
        ({"block_format": Sizes(1)}, "blocks", OVERLAP),
        ({"encode": ONE_SCALE}, "blocks", OVERLAP),
        ({"encode": USES_START}, "chunks", "encoded alone and decoded alone: expected"),
        ({"decode": rounds_twice}, "dtypes", "into torch.float16: expected"),
        ({"encode": CUTS_NAN}, "not_finite", "with nan at element 0: expected NaN or Inf in elements 0 to 0, got none"),
        ({"encode": refuses_large}, "not_finite", "encode of .*: expected no error, got ValueError: too large"),
        ({"decode_mean": lambda mean, wires_RW, *rest: mean(wires_RW.flip(0), *rest)}, "mean", "of 3 wires of .* by 3"),
        ({"encode_feedback": keeps_old_residual}, "feedback", "encode_feedback of .*: left_out_N: expected"),
        ({"decode_mean_encode_feedback": forgets_residual}, "feedback", "decode_mean_encode_feedback of 2 wires of"),
    ],
)
def test_codecs_that_break_the_contract(changes: dict[str, Any], check: str, message: str) -> None:
    with pytest.raises(CodecFault, match=f"^torchbagua: check '{check}' of .* failed: .*{message}"):
        check_codec(broken(**changes))


def test_only_codecs_are_checked() -> None:
    check_codec(Scaled())  # the broken codecs are broken by their changes alone
    with pytest.raises(TypeError, match=r"check_codec: codec must be a torchbagua.codecs.Compressor, got 'topk'"):
        check_codec("topk")  # type: ignore[arg-type]


def test_a_users_codec_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REGISTERED is FewLargest
    monkeypatch.setitem(REGISTRY, "few_largest", FewLargest)
    assert by_name("few_largest", block=64, num_kept=5) == FewLargest(64, num_kept=5)
    with pytest.raises(ValueError, match="a codec named 'few_largest' is already registered"):
        register_compressor("few_largest", FewLargest)
    with pytest.raises(ValueError, match="'few_largest' needs error_feedback=True"):
        tb.CompressedAllReduceAlgorithm("few_largest")
