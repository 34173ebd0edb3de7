"""The operations that the codec benchmark times: a codec's operations on tensors of one type, in one layout.

The mean is computed from the chunks of several senders that are together as large as the tensor, as in a bucket reduced
over that many ranks. On a GPU, `of all` marks a mean of chunks that are each as large as the tensor. Layouts: `one
parameter` is one parameter in blocks of the codec's block size, `parameters` is transformer layers with blocks that end
with their parameter, and `one block` is a single block, as Bagua's single range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from torchbagua.codecs import BlockK, MinMaxUInt4, MinMaxUInt8, Sign1Bit, TensorSpec, TopK

OPS = torch.ops.torchbagua
BLOCK = 2048
WIDTH = 512
# Parameter sizes of a transformer layer.
NORM = [WIDTH, WIDTH]
ATTENTION = [3 * WIDTH * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH]
FEED_FORWARD = [4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH]
LAYER = [*NORM, *ATTENTION, *NORM, *FEED_FORWARD]
OF_ALL = " of all"

Codec = type[MinMaxUInt8 | MinMaxUInt4 | Sign1Bit | TopK | BlockK]
CODECS: tuple[Codec, ...] = (MinMaxUInt8, MinMaxUInt4, Sign1Bit, TopK, BlockK)
Arguments = tuple[Any, ...]


def parameters(num_elements: int) -> list[int]:
    """Return the parameter sizes of as many transformer layers as fit, and one more for the remaining elements."""
    sizes = LAYER * (num_elements // sum(LAYER))
    return [*sizes, num_elements - sum(sizes)]


ONE_PARAMETER, ONE_BLOCK = "one parameter", "one block"
# By layout: a function of the number of elements that returns the sizes of the parameters.
LAYOUTS: dict[str, Callable[[int], list[int]]] = {
    ONE_PARAMETER: lambda num_elements: [num_elements],
    "parameters": parameters,
    ONE_BLOCK: lambda num_elements: [num_elements],
}


@dataclass(frozen=True)
class Case:
    """A codec on tensors of one type and layout.

    Attributes:
        num_elements, num_senders: see `Setting`.
    """

    codec: Codec
    layout: str
    dtype: torch.dtype
    device: torch.device
    num_elements: int
    num_senders: int

    def filled(self, num_elements: int, seed: int = 0) -> Tensor:
        """Return random values of the magnitude of gradients."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(num_elements, generator=generator, device=self.device) * 1e-2).to(self.dtype)

    def encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block table of `x`, in one chunk, and its encoding."""
        sizes = LAYOUTS[self.layout](x.numel())
        spec = TensorSpec(tuple(sizes), self.dtype, self.device, self.layout)
        codec = self.codec(None) if self.layout == ONE_BLOCK else self.codec()
        layout = codec.layout(spec, [0, x.numel()])
        wire = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        codec.encode(x, layout, wire)
        return layout.table, wire

    def kernel(self, operation: str) -> str:
        """Return the name of the native operation in `torch.ops.torchbagua` and in the reference."""
        return f"{self.codec.op_prefix}_{operation.removesuffix(OF_ALL)}"

    def check(self) -> None:
        """Raise RuntimeError if decoding does not return the encoded values: the time of a wrong kernel is useless."""
        x = self.filled(self.num_elements)
        table, wire = self.encoded(x)
        decoded = torch.full_like(x, torch.nan)
        getattr(OPS, self.kernel("decode"))(wire, table, decoded)
        error = float((decoded - x).abs().max())
        largest = float(x.max() - x.min()) / 255 if self.codec is MinMaxUInt8 else 2 * float(x.abs().max())
        if not error <= largest:
            raise RuntimeError(f"{self}: the error of decoded values must be at most {largest}, got {error}")


class Buffers:
    """The arguments of a case's operations: tensors that are created on first use."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @cached_property
    def x(self) -> Tensor:
        return self._case.filled(self._case.num_elements)

    @cached_property
    def y(self) -> Tensor:
        return torch.zeros_like(self.x)

    @cached_property
    def table_and_wire(self) -> tuple[Tensor, Tensor]:
        return self._case.encoded(self.x)

    def arguments(self) -> dict[str, Callable[[], Arguments]]:
        """Return functions that create the arguments, by operation."""
        case = self._case
        chunk = case.num_elements // case.num_senders

        def encode() -> Arguments:
            return self.x, *self.table_and_wire

        def decode() -> Arguments:
            table, wire = self.table_and_wire
            return wire, table, self.y

        def feedback() -> Arguments:
            return self.x, case.filled(case.num_elements, seed=1), *self.table_and_wire, self.y

        def mean(length: int, *, encodes: bool) -> Arguments:
            x = case.filled(length)
            table, wire = case.encoded(x)
            return wire.repeat(case.num_senders, 1), table, float(case.num_senders), wire if encodes else x

        found: dict[str, Callable[[], Arguments]] = {"encode": encode, "decode": decode}
        found["decode_mean_encode"] = partial(mean, chunk, encodes=True)
        if case.device.type == "cuda":
            found[f"decode_mean_encode{OF_ALL}"] = partial(mean, case.num_elements, encodes=True)
        if case.dtype == torch.float32:
            found |= {"decode_mean": partial(mean, chunk, encodes=False), "encode_feedback": feedback}
        return found
