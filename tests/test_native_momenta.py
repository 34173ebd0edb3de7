"""Momenta encoded in one pass: the fused kernels are bitwise equal to the transformation followed by the codec."""

import os
import sys

import pytest
import torch
from torch import Tensor

import programs
from native_codecs import random_bits
from torchbagua import native
from torchbagua.codecs.base import TensorSpec, by_name
from torchbagua.native.ops import ELEMENT_TYPES, NATIVE_OPS
from torchbagua.native.qadam import MOMENTA_CODECS

OPS = torch.ops.torchbagua
# Of parameters: shorter and longer than a part, a block and a tile, odd lengths, and 0.
LENGTHS = [1, 127, 128, 300, 0, 2048, 2 * 4096 + 5, 33]
BETA1S = [0.9, 0.9, 0.5, 0.9, 0.9, 0.75, 0.9, 0.0]
SCALE = 1024.0
SHARES = [(1.0 - beta1) / SCALE for beta1 in BETA1S]
BLOCKS = [128, 2048, 8192]  # the last does not fit a tile


@pytest.fixture(autouse=True, scope="module")
def _native_kernels() -> None:
    native.load()
    paths = {row.path for row in native.status() if row.device == "cpu" and "momenta" in row.operation}
    assert paths in ({"aot"}, {"jit"})


class Case:
    """Gradients, momenta of several dtypes, a residual, and the blocks of a codec over them."""

    def __init__(self, codec: str, block: int, *, hostile: str = "no") -> None:
        generator = torch.Generator().manual_seed(block)
        total = sum(LENGTHS)
        self.codec = codec
        self.gradients, self.residual = torch.randn(2, total, generator=generator).unbind()
        self.gradients = self.gradients * SCALE
        if hostile == "bits":
            self.gradients, self.residual = random_bits(total, 1), random_bits(total, 2)
        if hostile == "nan":
            self.gradients[[0, 500, 5000]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        types = [ELEMENT_TYPES[index % len(ELEMENT_TYPES)] for index in range(len(LENGTHS))]
        self.momenta = [
            torch.randn(length, generator=generator).to(dtype) for length, dtype in zip(LENGTHS, types, strict=True)
        ]
        spec = TensorSpec(tuple(LENGTHS), torch.float32, torch.device("cpu"), "a test")
        compressor = type(by_name(codec))(block=block)
        layout = compressor.layout(spec, [0, total])
        self.table, self.wire = layout.table, torch.full((layout.num_bytes,), 7, dtype=torch.uint8)

    @property
    def numbers(self) -> tuple[list[Tensor], list[float], list[float]]:
        return self.momenta, BETA1S, SHARES

    def transform(self, name: str, values: Tensor) -> Tensor:
        """Return the result of QAdam's separate operation on the values."""
        values = values.clone()
        for part, momentum, beta1, share in zip(values.split(LENGTHS), *self.numbers, strict=True):
            getattr(OPS, name)([part], [momentum], beta1=beta1, share=share)
        return values

    def op(self, name: str) -> torch._ops.OpOverload:
        return getattr(OPS, f"{self.codec}_{name}").default


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether each element is bitwise equal, or NaN in both."""
    differs = first.view(torch.int32) != second.view(torch.int32)
    return bool((~differs | (first.isnan() & second.isnan())).all())


@pytest.mark.parametrize("hostile", ["no", "nan", "bits"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("codec", sorted(MOMENTA_CODECS))
def test_bits_are_those_of_two_operations(codec: str, block: int, hostile: str) -> None:
    case = Case(codec, block, hostile=hostile)
    sent = case.transform("qadam_form_momenta", case.gradients)
    two_steps, reference = case.wire.clone(), case.wire.clone()
    case.op("encode")(sent, case.table, two_steps)
    case.op("encode_momenta")(case.gradients, case.table, case.wire, *case.numbers)
    NATIVE_OPS[f"{codec}_encode_momenta"](case.gradients, case.table, reference, *case.numbers)
    assert torch.equal(case.wire, two_steps)
    assert torch.equal(case.wire, reference)

    averages, gradients = torch.empty_like(sent), torch.empty_like(sent)
    case.op("decode")(case.wire, case.table, averages)
    case.op("decode_gradients")(case.wire, case.table, gradients, *case.numbers)
    assert is_same(gradients, case.transform("qadam_form_gradients", averages))
    NATIVE_OPS[f"{codec}_decode_gradients"](case.wire, case.table, averages, *case.numbers)
    assert is_same(gradients, averages)


@pytest.mark.parametrize("hostile", ["no", "nan", "bits"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("codec", sorted(MOMENTA_CODECS))
def test_bits_with_feedback_are_those_of_two_operations(codec: str, block: int, hostile: str) -> None:
    case = Case(codec, block, hostile=hostile)
    sent = case.transform("qadam_form_momenta", case.gradients)
    wires, new_residuals = case.wire.repeat(3, 1), torch.empty(3, len(sent))
    case.op("encode_feedback")(sent, case.residual, case.table, wires[0], new_residuals[0])
    tensors = (case.gradients, case.residual, case.table)
    case.op("encode_momenta_feedback")(*tensors, wires[1], new_residuals[1], *case.numbers)
    NATIVE_OPS[f"{codec}_encode_momenta_feedback"](*tensors, wires[2], new_residuals[2], *case.numbers)
    for index in (1, 2):
        assert torch.equal(wires[0], wires[index])
        assert is_same(new_residuals[0], new_residuals[index])


def test_a_table_may_have_blocks_in_any_order_and_leave_elements_out() -> None:
    case = Case("minmax_uint8", 128)
    table = case.table.flip(0)[::2].contiguous()
    results = []
    for kernels in (OPS, None):
        wire, gradients = case.wire.clone(), torch.full_like(case.gradients, 3.0)
        for name, *arguments in (
            ("encode_momenta", case.gradients, table, wire),
            ("decode_gradients", wire, table, gradients),
        ):
            operation = case.op(name) if kernels is OPS else NATIVE_OPS[f"minmax_uint8_{name}"]
            operation(*arguments, *case.numbers)
        results.append((wire, gradients))
    (wire, gradients), (expected_wire, expected) = results
    assert torch.equal(wire, expected_wire)
    assert torch.equal(gradients, expected)
    assert (gradients == 3.0).any()


def test_refusals() -> None:
    case = Case("sign1bit", 128)
    momenta, beta1s, shares = case.numbers
    total = len(case.gradients)
    for numbers, message in (
        ((momenta[:-1], beta1s[:-1], shares[:-1]), f"momenta must be of the same total length as gradients, {total}"),
        (([*momenta[:-1], momenta[-1].double()], beta1s, shares), "momenta must be contiguous float32, bfloat16 or"),
        ((momenta, beta1s[:-1], shares), "beta1s must be a list of 8 numbers, got a list of 7"),
        ((momenta, beta1s, [*shares, 1.0]), "shares must be a list of 8 numbers, got a list of 9"),
    ):
        for operation in (case.op("encode_momenta"), NATIVE_OPS["sign1bit_encode_momenta"]):
            with pytest.raises(ValueError, match=f"^torchbagua::sign1bit_encode_momenta: {message}"):
                operation(case.gradients, case.table, case.wire, *numbers)
        assert (case.wire == 7).all()
    table = case.table.clone()
    table[-1, 1] += 1
    for name in ("encode_momenta", "decode_gradients"):
        first, last = (case.gradients, case.wire) if name == "encode_momenta" else (case.wire, case.gradients)
        with pytest.raises(ValueError, match=r"table must be rows .* of blocks within"):
            case.op(name)(first, table, last, *case.numbers)


def test_opcheck() -> None:
    case = Case("minmax_uint8", 128)
    new_residuals = torch.zeros_like(case.gradients)
    tensors = {
        "encode_momenta": (case.gradients, case.table, case.wire),
        "encode_momenta_feedback": (case.gradients, case.residual, case.table, case.wire, new_residuals),
        "decode_gradients": (case.wire, case.table, case.gradients),
    }
    for name, arguments in tensors.items():
        torch.library.opcheck(case.op(name), (*arguments, *case.numbers))


@pytest.mark.release
@pytest.mark.parametrize("instruction_set", ["default", "avx2"])
def test_under_other_instruction_sets(instruction_set: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "bits", __file__]
    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set})
