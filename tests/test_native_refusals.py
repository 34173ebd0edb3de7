"""Errors of the codecs' kernels: every backend and plain torch raise the same errors, and write nothing."""

import os
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request)


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


# The required form of each tensor, by its argument name; other lengths follow from these.
ALLOWED = {
    "x": r"contiguous float32(, bfloat16 or float16)? \[N\]",
    "residual": r"contiguous float32 \[(N|16)\]",
    "left_out": r"contiguous float32 \[16\]",
    "wire": r"contiguous uint8 \[(W|\d+)\]",
    "rows": r"contiguous uint8 \[R, W\]",
    "table": r"contiguous int64 \[B, [45]\]",
}


def good_arguments(codec: Codec, operation: str) -> dict[str, Any]:
    """Return valid arguments: two blocks of 8 elements that fill x and the wire to the last byte."""
    header, payload = codec.header_bytes, codec.payload_bytes(8)
    table = torch.tensor([codec.row(0, 8, 0, 2 * header), codec.row(8, 8, header, 2 * header + payload)])
    wire = torch.full((2 * (header + payload),), 7, dtype=torch.uint8)
    x = torch.linspace(-1, 1, 16)
    available = {"x": x, "table": table, "wire": wire, "rows": wire.repeat(2, 1), "divisor": 2.0}
    available |= {"residual": x.flip(0), "left_out": torch.zeros_like(x)}
    return {argument.name: available[argument.name] for argument in codec.native(operation)._schema.arguments}


def wrong_forms(good: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield an argument, an invalid value of it, and the message: one change of form, device or length at a time."""
    for name, value in good.items():
        if name == "divisor":
            for bad in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60):
                yield name, bad, "divisor must be a positive finite float32, got "
            continue
        forms = [value.to(torch.int16), value[None], torch.stack((value, value), -1)[..., 0]]
        if name != next(iter(good)):
            forms.append(value.to("meta"))
        if name == "table":
            forms += [value[:, :3].contiguous(), torch.cat((value, value), dim=1)]
        if name == "left_out" or (name == "residual" and "x" in good):  # must be as long as an earlier argument
            forms.append(value[:-1])
        for bad in forms:
            yield name, bad, f"{name} must be {ALLOWED[name]} on (cpu|cuda:0), got "
    if "rows" in good:
        yield "rows", good["rows"][:0], "rows must be a tensor of at least one row"
    if {"rows", "wire"} <= good.keys():
        yield "wire", good["wire"][:-1], rf"wire must be contiguous uint8 \[{len(good['wire'])}\] on .*, got "


def check_refused(backend: Backend, name: str, message: str, arguments: dict[str, Any]) -> None:
    """Check that a backend and plain torch raise the same ValueError, except for dtype spelling, and write nothing."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor) and value.device == CPU}
    before, messages = {key: tensor.clone() for key, tensor in tensors.items()}, []
    for kernel in (backend.kernel(name), NATIVE_OPS[name]):
        with pytest.raises(ValueError, match=f"^torchbagua::{name}: {message}") as caught:
            kernel(**arguments)
        messages.append(str(caught.value).split(", got")[0])
    assert messages[0].replace("cuda:0", "cpu") == messages[1]
    for key, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(7), before[key].nan_to_num(7))


MEANS = ("decode_mean", "decode_mean_encode", "decode_mean_encode_feedback")
OPERATIONS = pytest.mark.parametrize("operation", ["encode", "decode", "encode_feedback", *MEANS])


@OPERATIONS
def test_arguments_of_a_wrong_form_are_refused(backend: Backend, codec: Codec, operation: str) -> None:
    name, good = f"{codec.name}_{operation}", good_arguments(codec, operation)
    if not backend.has(name):
        return
    backend.kernel(name)(**good)
    for argument, bad, message in wrong_forms(good):
        check_refused(backend, name, message, {**good, argument: bad})


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


@OPERATIONS
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
