"""The sparse codecs' CUDA kernels on the host: bitwise equal to the reference for any values, addresses, lengths."""

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from native_codecs import BLOCKK, DTYPES, KINDS, TOPK, Codec, assert_same_values, lay_out
from test_cuda_dense import NAMES, Guarded, num_elements, run, values_of
from torchbagua.native.ops import NATIVE_OPS

OPERATIONS = ("encode", "decode", "decode_mean", "decode_mean_encode", "encode_feedback")
LENGTHS = [1, 7, 33, 64, 65, 130, 300]


@pytest.fixture(params=[TOPK, BLOCKK], ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def tables(codec: Codec) -> list[tuple[Tensor, int]]:
    """Return tables and the bytes of their wires: blocks in any order with gaps, keeping few or all elements."""
    table, wire_bytes = lay_out(codec, LENGTHS, seed=3)
    found = [(table, wire_bytes)]
    for length, kept in ((4096, 41), (2048, 1), (130, 130)):
        row = [0, length, 0, 4, kept]
        found.append((torch.tensor([row]), 4 + codec.bytes_of_kept(length, kept)))
    return found


@pytest.mark.parametrize("index", range(len(tables(TOPK))))
def test_every_operation_gives_the_bytes_of_the_reference(host_kernels: HostKernels, codec: Codec, index: int) -> None:
    table, wire_bytes = tables(codec)[index]
    reference = {name: NATIVE_OPS[f"{codec.name}_{name}"] for name in OPERATIONS}
    kinds = KINDS if index == 0 else ("scaled", "zeros", "one not finite")
    rows = torch.zeros(len(kinds), wire_bytes, dtype=torch.uint8)
    for number, kind in enumerate(kinds):
        values = values_of(kind, table)
        for dtype in DTYPES if number == 0 else (torch.float32,):
            x, shift = Guarded(values.to(dtype), number % 3), number % 4
            wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shift)
            expected = torch.full_like(wire.tensor, 9)
            reference["encode"](x.tensor, table, expected)
            assert run(host_kernels, codec, f"encode_{NAMES[dtype]}", x.tensor, table, wire.tensor) == "done"
            assert torch.equal(wire.tensor, expected)
            assert wire.is_intact()
            decoded = Guarded(torch.full_like(x.tensor, 9.0), number % 3)
            expected = torch.full_like(x.tensor, 9.0)
            reference["decode"](wire.tensor, table, expected)
            assert run(host_kernels, codec, f"decode_{NAMES[dtype]}", wire.tensor, table, decoded.tensor) == "done"
            assert_same_values(decoded.tensor, expected)
            assert decoded.is_intact()
        rows[number] = wire.tensor

        residual, new_residual = values.flip(0) / 256, Guarded(torch.full_like(values, 9.0), 1)
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shift)
        expected, expected_residual = torch.full_like(wire.tensor, 9), torch.full_like(values, 9.0)
        reference["encode_feedback"](values, residual, table, expected, expected_residual)
        arguments = (values, residual, table, wire.tensor, new_residual.tensor)
        assert run(host_kernels, codec, "encode_feedback_float32", *arguments) == "done"
        assert torch.equal(wire.tensor, expected)
        assert_same_values(new_residual.tensor, expected_residual)
        assert new_residual.is_intact()

    for senders, divisor in ((rows[:2], 2.0), (rows, 3.0)):
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), 1)
        expected = torch.full_like(wire.tensor, 9)
        reference["decode_mean_encode"](senders, table, divisor, expected)
        assert run(host_kernels, codec, "decode_mean_encode", senders, table, divisor, wire.tensor) == "done"
        assert torch.equal(wire.tensor, expected)
        assert wire.is_intact()
        x = Guarded(torch.full((num_elements(table),), 9.0), 1)
        expected = torch.full_like(x.tensor, 9.0)
        reference["decode_mean"](senders, table, divisor, expected)
        assert run(host_kernels, codec, "decode_mean_float32", senders, table, divisor, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()


def test_spoiled_wires_decode_as_by_the_reference(host_kernels: HostKernels, codec: Codec) -> None:
    """Indices out of range or out of order and arbitrary headers never write outside x."""
    table, wire_bytes = lay_out(codec, LENGTHS, seed=4)
    wire = torch.zeros(wire_bytes, dtype=torch.uint8)
    NATIVE_OPS[f"{codec.name}_encode"](values_of("scaled", table), table, wire)
    generator = torch.Generator().manual_seed(0)
    num_spoiled = 0
    for _ in range(40):
        spoiled = wire.clone()
        places = torch.randint(wire_bytes, (4,), generator=generator)
        spoiled[places] = torch.randint(256, (4,), generator=generator).to(torch.uint8)
        x = Guarded(torch.full((num_elements(table),), 9.0), 0)
        expected = torch.full_like(x.tensor, 9.0)
        NATIVE_OPS[f"{codec.name}_decode"](spoiled, table, expected)
        assert run(host_kernels, codec, "decode_float32", spoiled, table, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()
        num_spoiled += bool(expected.isnan().any())
    assert 0 < num_spoiled < 40


BAD_ROWS = [
    (0, 64, 0, 4, 0),
    (0, 64, 0, 4, 65),
    (0, 64, 0, 4, -1),
    (1, 64, 0, 4, 3),
    (0, 64, 0, 5, 3),
    (0, 64, 2, 4, 3),
]
BAD_ROWS += [(0, 0, 0, 4, 0), (0, 4097, 0, 4, 1), (0, 2**62, 0, 4, 3), (0, 64, 0, 4, 2**62)]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_block_outside_its_tensors_traps(host_kernels: HostKernels, codec: Codec, row: tuple[int, ...]) -> None:
    x, wire = torch.zeros(64), torch.zeros(4 + codec.bytes_of_kept(64, 3), dtype=torch.uint8)
    for fields, outcome in (((0, 64, 0, 4, 3), "done"), (row, "trapped")):
        table = torch.tensor([fields])
        assert run(host_kernels, codec, "encode_float32", x, table, wire) == outcome
        assert run(host_kernels, codec, "decode_float32", wire, table, x) == outcome
