"""The native codecs for the tests: their bytes, tables of blocks, and hostile values; and the numbers of QAdam."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from devices import CPU, load_kernels
from torchbagua.native.topk import index_bits

OPS = torch.ops.torchbagua
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
L = 128  # a block length of the tests: four of the kernels' 32 lanes
TILE = 4096  # elements: the kernels process longer blocks in several steps
_FORM = {"beta1": 0.9, "share": 0.1 / 1024}
QADAM = {
    "qadam_update": {
        "gradient_sign": -1.0,
        "weight_decay": 0.1,
        "shrink": 0.99,
        "beta1": 0.9,
        "root_correction2": 0.3,
        "eps": 1e-8,
        "largest_ratio": 0.7,  # many ratios of random values are larger
        "step_size": 1e-3,
    },
    "qadam_form_momenta": _FORM,
    "qadam_form_gradients": _FORM,
}
"""The numbers that QAdam's operations take, by operation."""


@dataclass(frozen=True)
class Codec:
    """The bytes of a block, the prefix of the operations' names, and the device of the native kernels.

    The reference runs on the CPU, and all tensors of the tests are there. For a sparse codec, `kept_of_64` is the
    number of elements of 64 that the tests keep, `index_bytes` the size of a block's positions (None if each element
    has an index), and `longest` the longest block.
    """

    name: str
    header_bytes: int
    elements_per_byte: int
    device: torch.device = CPU
    kept_of_64: int | None = None
    index_bytes: int | None = None
    longest: int = 2**63 - 1

    def on(self, device: torch.device) -> "Codec":
        """Return the same codec with its kernels on `device`, which are loaded."""
        load_kernels(device, self.name)
        return replace(self, device=device)

    def payload_bytes(self, length: int) -> int:
        """Return the payload bytes of a block of `length` elements."""
        kept = self.num_kept(length)
        return -(-length // self.elements_per_byte) if kept is None else self.bytes_of_kept(length, kept)

    def bytes_of_kept(self, length: int, kept: int) -> int:
        """Return the payload bytes of a block of `length` elements of which `kept` are kept."""
        packed = -(-kept * index_bits(length) // 8)
        return kept + (packed if self.index_bytes is None else self.index_bytes)

    def num_kept(self, length: int) -> int | None:
        """Return how many elements of a block of `length` elements are kept; None if all are."""
        return None if self.kept_of_64 is None else -(-length * self.kept_of_64 // 64)

    def row(self, start: int, length: int, header: int, payload: int) -> tuple[int, ...]:
        """Return a row of a table, with any numbers."""
        kept = self.num_kept(max(1, min(length, 2**31)))
        return (start, length, header, payload, *([] if kept is None else [kept]))

    def native(self, operation: str) -> torch._ops.OpOverload:
        """Return the operation itself, for tensors on any device."""
        return getattr(OPS, f"{self.name}_{operation}").default


MINMAX_UINT8 = Codec("minmax_uint8", header_bytes=8, elements_per_byte=1)
MINMAX_UINT4 = Codec("minmax_uint4", header_bytes=4, elements_per_byte=2)
SIGN_1BIT = Codec("sign1bit", header_bytes=4, elements_per_byte=8)
TOPK = Codec("topk", header_bytes=4, elements_per_byte=0, kept_of_64=8, longest=4096)
BLOCKK = replace(TOPK, name="blockk", index_bytes=2)
CODECS = (MINMAX_UINT8, MINMAX_UINT4, SIGN_1BIT, TOPK, BLOCKK)


def lay_out(codec: Codec, lengths: list[int], seed: int = 0) -> tuple[Tensor, int]:
    """Return a table of blocks of `lengths`, and its wire's size.

    Blocks are in any order in x, in the wire and in the table, with gaps between them.
    """
    generator = torch.Generator().manual_seed(seed)

    def place(sizes: list[int], unit: int) -> list[int]:
        offsets, offset = [0] * len(sizes), 0
        for index in torch.randperm(len(sizes), generator=generator).tolist():
            offset += unit * int(torch.randint(0, 3, (), generator=generator))
            offsets[index] = offset
            offset += sizes[index]
        return offsets

    start = place(lengths, 1)
    header = place([codec.header_bytes] * len(lengths), 4)
    first_payload = max(header, default=0) + codec.header_bytes
    sizes = [codec.payload_bytes(length) for length in lengths]
    payload = [first_payload + offset for offset in place(sizes, 1)]
    rows = [codec.row(*fields) for fields in zip(start, lengths, header, payload, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(codec.row(0, 1, 0, 0)))
    return table, max((p + n for p, n in zip(payload, sizes, strict=True)), default=0) + 5


def num_elements(table: Tensor) -> int:
    """Return the size of an x that contains all blocks and a few elements more."""
    return int((table[:, 0] + table[:, 1]).max()) + 3 if len(table) else 0


def random_bits(count: int, seed: int) -> Tensor:
    """Return random float32 values of any bits: NaN, Inf, subnormals and all others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def hostile_values(kind: str, count: int, seed: int) -> Tensor:
    """Return `count` float32 values of one hostile kind."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    bits = random_bits(count, seed)
    if kind == "one not finite":
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0**126, -(2.0**127)])[seed % 5]
        normal[seed % max(count, 1) :][:1] = bad
        return normal
    return {
        "any bits": bits,
        "finite bits": torch.where(bits.abs() < 2.0**126, bits, 1.0),
        "constant": random_bits(1, seed).nan_to_num().clamp(-1e37, 1e37).repeat(count),
        "zeros": torch.where(normal > 0, 0.0, -0.0),
        "subnormal": normal * 1e-39,
        "offset": 1e3 + normal * 1e-3,
        "one sign": normal.abs() + 1e-3,
        "scaled": normal * 10.0 ** ((seed % 77) - 38),  # 1e-38 to 1e38
    }[kind]


KINDS = ("scaled", "any bits", "finite bits", "one not finite", "constant", "zeros", "subnormal", "offset", "one sign")


def assert_same_values(got: Tensor, expected: Tensor) -> None:
    """Assert equal bits, but accept any NaN for a NaN: its payload depends on the processor."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
    assert same.all(), (got[~same], expected[~same])
