"""What the kernels of the codecs refuse: native and reference alike, in the same words, with nothing written."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import CPU
from native_codecs import CODECS, Codec


@pytest.fixture(scope="module", params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest, device: torch.device) -> Codec:
    return request.param.on(device)


# The message that names the argument, and what to change in good arguments of encode and decode to get it.
BAD_CODEC_ARGUMENTS: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
    ("x must be contiguous float32", lambda good: {"x": good["x"].double()}),
    ("x must be contiguous float32", lambda good: {"x": good["x"].repeat(2)[::2]}),
    ("x must be contiguous float32", lambda good: {"x": good["x"][None]}),
    ("wire must be contiguous uint8", lambda good: {"wire": good["wire"].to(torch.int8)}),
    ("wire must be contiguous uint8", lambda good: {"wire": good["wire"].repeat(2)[::2]}),
    ("wire must be contiguous uint8", lambda good: {"wire": good["wire"][None]}),
    ("wire must be on (cpu|cuda:0)", lambda good: {"wire": good["wire"].to("meta")}),
    ("table must be contiguous int64", lambda good: {"table": good["table"].int()}),
    ("table must be contiguous int64", lambda good: {"table": good["table"][:, :3].contiguous()}),
    ("table must be contiguous int64", lambda good: {"table": good["table"].repeat(2, 1)[::2]}),
]

# The same where the table's content is wrong. That is on the device: on a GPU only a kernel could look, and it traps.
BAD_TABLES: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
    ("table must be rows .* bytes of wire, got row 1", lambda good: {"wire": good["wire"][:-1]}),
    ("table must be rows .* elements of x .*, got row 1", lambda good: {"x": good["x"][:-1]}),
]


def good_arguments(codec: Codec) -> dict[str, Tensor]:
    """Two blocks of 8 elements that fill x and the wire to the last byte."""
    header, payload = codec.header_bytes, codec.payload_bytes(8)
    table = torch.tensor([[0, 8, 0, 2 * header], [8, 8, header, 2 * header + payload]])
    wire = torch.full((2 * (header + payload),), 7, dtype=torch.uint8)
    return {"x": torch.linspace(-1, 1, 16), "table": table, "wire": wire}


def bad_rows(codec: Codec) -> list[tuple[int, ...]]:
    """What a block of the good arguments cannot be."""
    wire_bytes, payload = len(good_arguments(codec)["wire"]), 2 * codec.header_bytes
    late_header = (wire_bytes - codec.header_bytes) // 4 * 4 + 4
    late_payload = wire_bytes - codec.payload_bytes(8) + 1
    rows = [(0, 0, 0, payload), (-1, 8, 0, payload), (9, 8, 0, payload), (0, 17, 0, payload)]
    rows += [(0, 8, -4, payload), (0, 8, 2, payload), (0, 8, late_header, payload)]
    rows += [(0, 8, 0, -1), (0, 8, 0, late_payload), (0, 9, 0, late_payload - 1)]
    rows += [(0, -(2**63), 0, payload), (2**63 - 1, 8, 0, payload), (0, 2**63 - 1, 0, 2**63 - 1)]
    return [*rows, (0, 8, 2**63 - 4, payload), (0, 8, 0, 2**63 - 1)]


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
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("operation", ["encode", "decode"])
@pytest.mark.parametrize(("message", "changes"), BAD_CODEC_ARGUMENTS)
def test_bad_arguments_are_refused(
    codec: Codec, operation: str, message: str, changes: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    good = good_arguments(codec)
    codec.kernels(operation)[0](**good)
    assert_refused(codec, operation, message, {**good, **changes(good)})


@pytest.mark.parametrize("own", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("operation", ["encode", "decode"])
@pytest.mark.parametrize(("message", "changes"), BAD_TABLES)
def test_tables_of_more_than_there_is_are_refused(
    own: Codec, operation: str, message: str, changes: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    codec = own.on(CPU)
    good = good_arguments(codec)
    codec.kernels(operation)[0](**good)
    assert_refused(codec, operation, message, {**good, **changes(good)})


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x must be contiguous float32", {"x": torch.zeros(16, dtype=torch.bfloat16)}),
        ("x must be contiguous float32", {"x": torch.zeros(32)[::2]}),
        (r"residual must be contiguous float32 \[16\]", {"residual": torch.zeros(15)}),
        (r"residual must be contiguous float32 \[16\]", {"residual": torch.zeros(4, 4)}),
        (r"left_out must be contiguous float32 \[16\]", {"left_out": torch.zeros(16, dtype=torch.float64)}),
        ("wire must be contiguous uint8", {"wire": torch.zeros(32)}),
        ("table must be contiguous int64", {"table": torch.zeros(1, 4)}),
    ],
)
def test_bad_arguments_with_feedback_are_refused(codec: Codec, message: str, changes: dict[str, Any]) -> None:
    good = good_arguments(codec)
    arguments = {**good, "residual": good["x"].flip(0), "left_out": torch.zeros_like(good["x"])}
    codec.kernels("encode_feedback")[0](**arguments)
    assert_refused(codec, "encode_feedback", message, {**arguments, **changes})


@pytest.mark.parametrize(("own", "row"), [(codec, row) for codec in CODECS for row in bad_rows(codec)])
def test_blocks_outside_the_tensors_are_refused(own: Codec, row: tuple[int, ...]) -> None:
    codec = own.on(CPU)
    arguments = good_arguments(codec)
    arguments["table"][1] = torch.tensor(row)
    message = rf"table must be rows .*, got row 1 = \({', '.join(map(str, row))}\)"
    assert_refused(codec, "encode", message, arguments)
    assert_refused(codec, "decode", message, arguments)
    more = {"residual": arguments["x"].flip(0), "left_out": torch.zeros_like(arguments["x"])}
    assert_refused(codec, "encode_feedback", message, {**arguments, **more})
    wire, table = arguments["wire"], arguments["table"]
    mean_arguments = {"rows": wire[None].clone(), "table": table, "divisor": 1.0, "x": arguments["x"]}
    assert_refused(codec, "decode_mean", message, mean_arguments)
    mean_arguments = {"rows": wire[None].clone(), "table": table, "divisor": 1.0, "wire": wire}
    if 0 <= row[0] <= 8 and row[1] != 17:  # the mean does not use start, and a row may have room for 17 elements
        assert_refused(codec, "decode_mean_encode", message, mean_arguments)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("rows must be contiguous uint8", {"rows": torch.zeros(2, 32)}),
        ("rows must be contiguous uint8", {"rows": torch.zeros(32, dtype=torch.uint8)}),
        ("rows must be of at least one row", {"rows": torch.zeros(0, 32, dtype=torch.uint8)}),
        ("wire must be as long as a row, 36 bytes", {"rows": torch.zeros(2, 36, dtype=torch.uint8)}),
        ("wire must be contiguous uint8", {"wire": torch.zeros(32)}),
        ("divisor must be a positive finite float32", {"divisor": 0.0}),
        ("divisor must be a positive finite float32", {"divisor": -1.0}),
        ("divisor must be a positive finite float32", {"divisor": float("nan")}),
        ("divisor must be a positive finite float32", {"divisor": 1e39}),
        ("divisor must be a positive finite float32", {"divisor": 1e-60}),
        ("table must be contiguous int64", {"table": torch.zeros(1, 4)}),
    ],
)
def test_bad_arguments_of_the_mean_are_refused(codec: Codec, message: str, changes: dict[str, Any]) -> None:
    good = good_arguments(codec)
    arguments = {"rows": good["wire"].repeat(2, 1), "table": good["table"], "divisor": 2.0, "wire": good["wire"]}
    codec.kernels("decode_mean_encode")[0](**arguments)
    assert_refused(codec, "decode_mean_encode", message, {**arguments, **changes})
    if not message.startswith("wire"):
        mean_arguments = {**arguments, **changes, "x": torch.zeros(16)}
        del mean_arguments["wire"]
        assert_refused(codec, "decode_mean", message, mean_arguments)


@pytest.mark.parametrize("x", [torch.zeros(16, dtype=torch.bfloat16), torch.zeros(4, 4), torch.zeros(32)[::2]])
def test_what_a_mean_cannot_be_written_to_is_refused(codec: Codec, x: Tensor) -> None:
    good = good_arguments(codec)
    arguments = {"rows": good["wire"].repeat(2, 1), "table": good["table"], "divisor": 2.0, "x": x}
    assert_refused(codec, "decode_mean", r"x must be contiguous float32 \[N\]", arguments)
