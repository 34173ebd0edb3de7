"""Errors of the codecs' kernels: every backend and plain torch raise the same errors, and write nothing."""

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
from backends import BACKENDS, Backend, backend_of
from devices import CPU
from native_codecs import CODECS, Codec
from pretended_driver import Trapped
from source_tree import COMPILER, REPOSITORY
from torchbagua.native import loader, recipe
from torchbagua.native.build import instruction_set_flag
from torchbagua.native.ops import NATIVE_OPS

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


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request)


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


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


def check_refused(backend: Backend, name: str, message: str, arguments: Mapping[str, Any]) -> None:
    """Check that a backend and plain torch raise the same ValueError, except for dtype spelling, and write nothing."""
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    messages = []
    for kernel in (backend.kernel(name), NATIVE_OPS[name]):
        with pytest.raises(ValueError, match=f"^torchbagua::{name}: {message}") as caught:
            kernel(**arguments)
        messages.append(str(caught.value).split(", got")[0])
    assert messages[0].replace("cuda:0", "cpu") == messages[1]
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.device == CPU:
            assert torch.equal(value.nan_to_num(7), before[key].nan_to_num(7))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arguments_of_a_wrong_form_are_refused(backend: Backend, codec: Codec, operation: str) -> None:
    name, good = f"{codec.name}_{operation}", good_arguments(codec, operation)
    if not backend.has(name):
        return
    backend.kernel(name)(**good)
    for argument, tensor in good.items():
        if isinstance(tensor, Tensor):
            for bad in spoiled(argument, good):
                message = f"{argument} must be {ALLOWED[argument]} on (cpu|cuda:0), got "
                check_refused(backend, name, message, {**good, argument: bad})
    if "rows" in good:
        no_rows = {**good, "rows": good["rows"][:0]}
        check_refused(backend, name, "rows must be a tensor of at least one row", no_rows)
        for divisor in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60):
            message = "divisor must be a positive finite float32, got "
            check_refused(backend, name, message, {**good, "divisor": divisor})
        if "wire" in good:
            message = rf"wire must be contiguous uint8 \[{len(good['wire'])}\] on .*, got "
            check_refused(backend, name, message, {**good, "wire": good["wire"][:-1]})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_blocks_outside_the_tensors_are_refused(backend: Backend, codec: Codec, operation: str) -> None:
    """The rows of a table are on the device: on a GPU only a kernel can check them, and it ends itself."""
    name, good = f"{codec.name}_{operation}", good_arguments(codec, operation)
    if backend.name == "gpu" or not backend.has(name):
        return
    cases = []
    shorter = {key: good[key][..., :-1].contiguous() for key in ("rows", "wire") if key in good}
    cases.append(({**good, **shorter}, "table must be rows .* bytes of wire, got row 1"))
    if "x" in good or "residual" in good:
        shorter = {key: good[key][:-1] for key in ("x", "residual", "left_out") if key in good}
        cases.append(({**good, **shorter}, "table must be rows .* elements of x .*, got row 1"))
    for row in bad_rows(codec):
        if operation == "decode_mean_encode" and (not 0 <= row[0] <= 8 or row[1] == 17):
            continue  # it does not use start, and a row may have room for 17 elements
        table = good["table"].clone()
        table[1] = torch.tensor(row)
        message = rf"table must be rows .*, got row 1 = \({', '.join(map(str, row))}\)"
        cases.append(({**good, "table": table}, message))
    for arguments, message in cases:
        if backend.name == "cpu":
            check_refused(backend, name, message, arguments)
        else:
            with pytest.raises(Trapped):
                backend.kernel(name)(**arguments)


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
