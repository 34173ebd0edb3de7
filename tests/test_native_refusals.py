"""What the kernels of the codecs refuse: native and reference alike, in the same words, with nothing written."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import CPU
from native_codecs import CODECS, Codec

MEANS = ("decode_mean", "decode_mean_encode", "decode_mean_encode_feedback")
OPERATIONS = ("encode", "decode", "encode_feedback", *MEANS)
# What a tensor must be, by the operations' names for it; other lengths follow from these.
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
    """Two blocks of 8 elements that fill x and the wire to the last byte."""
    header, payload = codec.header_bytes, codec.payload_bytes(8)
    rows = codec.row(0, 8, 0, 2 * header), codec.row(8, 8, header, 2 * header + payload)
    table = torch.tensor(rows)
    wire = torch.full((2 * (header + payload),), 7, dtype=torch.uint8)
    x = torch.linspace(-1, 1, 16)
    every = {"x": x, "table": table, "wire": wire, "rows": wire.repeat(2, 1), "divisor": 2.0}
    every |= {"residual": x.flip(0), "left_out": torch.zeros_like(x)}
    return {argument.name: every[argument.name] for argument in codec.native(operation)._schema.arguments}


def spoiled(name: str, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The argument with another type, another number of dimensions, gaps, or not beside the first, one at a time."""
    good, is_first = arguments[name], name == next(iter(arguments))
    bad = [good.to(torch.int16), good[None], torch.stack((good, good), -1)[..., 0]]
    if not is_first:
        bad.append(good.to("meta"))
    if name == "table":
        bad += [good[:, :3].contiguous(), torch.cat((good, good), dim=1)]
    if name == "left_out" or (name == "residual" and "x" in arguments):  # as long as one before it
        bad.append(good[:-1])
    return bad


def bad_rows(codec: Codec) -> list[tuple[int, ...]]:
    """What a block of the good arguments cannot be."""
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
    """Native and reference raise the same ValueError, up to how they write a dtype, and write nothing."""
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    said = []
    for kernel in codec.kernels(operation):
        with pytest.raises(ValueError, match=f"^torchbagua::{codec.name}_{operation}: {message}") as caught:
            kernel(**arguments)
        said.append(str(caught.value).split(", got")[0])
    assert said[0].replace(str(codec.device), "cpu") == said[1]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_that_are_not_as_they_must_be_are_refused(codec: Codec, operation: str) -> None:
    good = good_arguments(codec, operation)
    codec.kernels(operation)[0](**good)
    for name, tensor in good.items():
        if isinstance(tensor, Tensor):
            for bad in spoiled(name, good):
                message = f"{name} must be {ALLOWED[name]} on (cpu|cuda:0), got "
                assert_refused(codec, operation, message, {**good, name: bad})


@pytest.mark.parametrize("operation", MEANS)
def test_a_mean_is_of_at_least_one_row(codec: Codec, operation: str) -> None:
    good = good_arguments(codec, operation)
    assert_refused(codec, operation, "rows must be of at least one row, got", {**good, "rows": good["rows"][:0]})


@pytest.mark.parametrize("operation", MEANS)
@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60])
def test_a_divisor_that_makes_no_mean_is_refused(codec: Codec, operation: str, divisor: float) -> None:
    good = good_arguments(codec, operation)
    message = "divisor must be a positive finite float32, got "
    assert_refused(codec, operation, message, {**good, "divisor": divisor})


def test_a_mean_is_as_long_as_a_row(codec: Codec) -> None:
    good = good_arguments(codec, "decode_mean_encode")
    row_bytes = good["rows"].shape[1]
    message = rf"wire must be contiguous uint8 \[{row_bytes}\] on .*, got "
    assert_refused(codec, "decode_mean_encode", message, {**good, "wire": good["wire"][:-1]})


# What a table holds is on the device: on a GPU only a kernel can look, and it traps.
@pytest.mark.parametrize("own", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tables_of_more_than_there_is_are_refused(own: Codec, operation: str) -> None:
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
