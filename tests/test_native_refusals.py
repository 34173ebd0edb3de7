"""Errors of the codecs' kernels: native and reference raise the same errors, and write nothing."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

import programs
from devices import CPU
from native_codecs import CODECS, Codec
from source_tree import COMPILER, REPOSITORY
from torchbagua.native import loader, recipe
from torchbagua.native.build import instruction_set_flag

MEANS = ("decode_mean", "decode_mean_encode", "decode_mean_encode_feedback")
OPERATIONS = ("encode", "decode", "encode_feedback", *MEANS)
# The required form of each tensor, by its argument name; other lengths follow from these.
ALLOWED = {
    "x": r"contiguous float32(, bfloat16 or float16)? \[N\]",
    "residual": r"contiguous float32 \[(N|16)\]",
    "left_out": r"contiguous float32 \[16\]",
    "wire": r"contiguous uint8 \[(W|\d+)\]",
    "rows": r"contiguous uint8 \[R, W\]",
    "table": r"contiguous int64 \[B, [45]\]",
}


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest, device: torch.device) -> Codec:
    return request.param.on(device)


def good_arguments(codec: Codec, operation: str) -> dict[str, Any]:
    """Return valid arguments: two blocks of 8 elements that fill x and the wire to the last byte."""
    header, payload = codec.header_bytes, codec.payload_bytes(8)
    rows = codec.row(0, 8, 0, 2 * header), codec.row(8, 8, header, 2 * header + payload)
    table = torch.tensor(rows)
    wire = torch.full((2 * (header + payload),), 7, dtype=torch.uint8)
    x = torch.linspace(-1, 1, 16)
    available = {"x": x, "table": table, "wire": wire, "rows": wire.repeat(2, 1), "divisor": 2.0}
    available |= {"residual": x.flip(0), "left_out": torch.zeros_like(x)}
    return {argument.name: available[argument.name] for argument in codec.native(operation)._schema.arguments}


def spoiled(name: str, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return invalid forms of the argument: other dtype, dimensions, strides, device, or length, one at a time."""
    good, is_first = arguments[name], name == next(iter(arguments))
    bad = [good.to(torch.int16), good[None], torch.stack((good, good), -1)[..., 0]]
    if not is_first:
        bad.append(good.to("meta"))
    if name == "table":
        bad += [good[:, :3].contiguous(), torch.cat((good, good), dim=1)]
    if name == "left_out" or (name == "residual" and "x" in arguments):  # must be as long as an earlier argument
        bad.append(good[:-1])
    return bad


def bad_rows(codec: Codec) -> list[tuple[int, ...]]:
    """Return table rows that are invalid for the good arguments."""
    wire_bytes, payload = len(good_arguments(codec, "encode")["wire"]), 2 * codec.header_bytes
    late_header = (wire_bytes - codec.header_bytes) // 4 * 4 + 4
    late_payload = wire_bytes - codec.payload_bytes(8) + 1
    rows = [(0, 0, 0, payload), (-1, 8, 0, payload), (9, 8, 0, payload), (0, 17, 0, payload)]
    rows += [(0, 8, -4, payload), (0, 8, 2, payload), (0, 8, late_header, payload)]
    rows += [(0, 8, 0, -1), (0, 8, 0, late_payload), (0, 9, 0, late_payload - 1)]
    rows += [(0, -(2**63), 0, payload), (2**63 - 1, 8, 0, payload), (0, 2**63 - 1, 0, 2**63 - 1)]
    rows += [(0, 8, 2**63 - 4, payload), (0, 8, 0, 2**63 - 1)]
    numbers = [] if codec.kept_of_64 is None else [0, 8, 9, -1, 2**63 - 1]
    kept = [(0, 8, 0, payload, number) for number in numbers]
    return [*(codec.row(*row) for row in rows), *kept]


def assert_refused(codec: Codec, operation: str, message: str, arguments: Mapping[str, Any]) -> None:
    """Check that native and reference raise the same ValueError, except for dtype spelling, and write nothing."""
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    messages = []
    for kernel in codec.kernels(operation):
        with pytest.raises(ValueError, match=f"^torchbagua::{codec.name}_{operation}: {message}") as caught:
            kernel(**arguments)
        messages.append(str(caught.value).split(", got")[0])
    assert messages[0].replace(str(codec.device), "cpu") == messages[1]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_of_a_wrong_form_are_refused(codec: Codec, operation: str) -> None:
    good = good_arguments(codec, operation)
    codec.kernels(operation)[0](**good)
    for name, tensor in good.items():
        if isinstance(tensor, Tensor):
            for bad in spoiled(name, good):
                message = f"{name} must be {ALLOWED[name]} on (cpu|cuda:0), got "
                assert_refused(codec, operation, message, {**good, name: bad})


@pytest.mark.parametrize("operation", MEANS)
def test_a_mean_needs_at_least_one_row(codec: Codec, operation: str) -> None:
    good = good_arguments(codec, operation)
    assert_refused(codec, operation, "rows must be a tensor of at least one row", {**good, "rows": good["rows"][:0]})


@pytest.mark.parametrize("operation", MEANS)
@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60])
def test_an_invalid_divisor_is_refused(codec: Codec, operation: str, divisor: float) -> None:
    good = good_arguments(codec, operation)
    message = "divisor must be a positive finite float32, got "
    assert_refused(codec, operation, message, {**good, "divisor": divisor})


def test_an_encoded_mean_must_be_as_long_as_a_row(codec: Codec) -> None:
    good = good_arguments(codec, "decode_mean_encode")
    row_bytes = good["rows"].shape[1]
    message = rf"wire must be contiguous uint8 \[{row_bytes}\] on .*, got "
    assert_refused(codec, "decode_mean_encode", message, {**good, "wire": good["wire"][:-1]})


# The rows of a table are on the device: on a GPU only a kernel can check them, and it traps.
@pytest.mark.parametrize("own", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tables_beyond_the_tensors_are_refused(own: Codec, operation: str) -> None:
    codec = own.on(CPU)
    good = good_arguments(codec, operation)
    if "wire" in good and "rows" not in good:
        message = "table must be rows .* bytes of wire, got row 1"
        assert_refused(codec, operation, message, {**good, "wire": good["wire"][:-1]})
    if "rows" in good:
        shorter = {name: good[name][..., :-1].contiguous() for name in ("rows", "wire") if name in good}
        assert_refused(codec, operation, "table must be rows .* bytes of wire, got row 1", {**good, **shorter})
    if "x" in good or "residual" in good:
        shorter = {name: good[name][:-1] for name in ("x", "residual", "left_out") if name in good}
        assert_refused(codec, operation, "table must be rows .* elements of x .*, got row 1", {**good, **shorter})


@pytest.mark.parametrize("own", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_blocks_outside_the_tensors_are_refused(own: Codec, operation: str) -> None:
    codec = own.on(CPU)
    for row in bad_rows(codec):
        if operation == "decode_mean_encode" and (not 0 <= row[0] <= 8 or row[1] == 17):
            continue  # it does not use start, and a row may have room for 17 elements
        good = good_arguments(codec, operation)
        good["table"][1] = torch.tensor(row)
        message = rf"table must be rows .*, got row 1 = \({', '.join(map(str, row))}\)"
        assert_refused(codec, operation, message, good)


_REFUSE = """
import sys, torch
import torchbagua  # the schemas
torch.ops.load_library(sys.argv[1])
table, wire = torch.tensor([[0, 16, 0, 8]]), torch.zeros(24, dtype=torch.uint8)
try:
    torch.ops.torchbagua.minmax_uint8_decode_mean_encode(torch.zeros(2, 24, dtype=torch.uint8), table, 0.5e-60, wire)
except ValueError as error:
    print(error)
"""


@pytest.mark.release
def test_a_library_with_a_libstdcxx_of_its_own_refuses(tmp_path: Path) -> None:
    """A compiler without the shared libstdc++ links the static one: beside torch's, its streams crash."""
    csrc, library = loader.sources(), tmp_path / "library.so"
    sources = [csrc / "cpu" / f"{name}.cpp" for name in ("minmax_uint8", "instruction_set", "old_glibc")]
    command = [*COMPILER, *recipe.CPU.cxx_flags, "-O0", instruction_set_flag(), "-fPIC", "-shared", *map(str, sources)]
    command += [f"-I{path}" for path in (csrc, *include_paths())] + [f"-L{path}" for path in library_paths()]
    # Functions of its own, and data of the process, as Ubuntu's Python links extensions.
    command += ["-ltorch_cpu", "-static-libstdc++", "-Wl,-Bsymbolic-functions", "-o", str(library)]
    programs.run(command)
    printed = programs.run(
        [sys.executable, "-c", _REFUSE, str(library)], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    message = "torchbagua::minmax_uint8_decode_mean_encode: divisor must be a positive finite float32, got 5e-61\n"
    assert printed.stdout == message
