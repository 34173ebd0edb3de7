"""The launcher of the NVRTC kernels and its calls of the driver; test_native_kernels.py compares what they compute."""

from typing import Any

import pytest
import torch
from torch import Tensor

import low_rank
from native_codecs import MINMAX_UINT4, MINMAX_UINT8, QADAM, SIGN_1BIT, Codec, lay_out, num_elements
from pretended_driver import STREAM, PretendedCompiler, PretendedDriver, kernels_on
from torchbagua.native import launcher, loader, tensor_tables
from torchbagua.native.ops import NATIVE_OPS

CODEC_OPERATIONS = ("encode", "decode", "decode_mean", "decode_mean_encode", "encode_feedback")


@pytest.fixture(autouse=True)
def _first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors on the CPU report device 0."""
    monkeypatch.setattr(Tensor, "get_device", lambda self: max(self.device.index or 0, 0))


def arguments_of(
    operation: str,
    table: Tensor,
    wire_bytes: int,
    dtype: torch.dtype = torch.float32,
    codec: Codec = MINMAX_UINT8,
) -> list[Any]:
    """Return valid arguments of an operation, in the order of BlockFormat's method, the written tensors last."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(num_elements(table), generator=generator).to(dtype) for _ in range(2))
    rows = torch.zeros(3, wire_bytes, dtype=torch.uint8)
    for row in rows:
        NATIVE_OPS[f"{codec.name}_encode"](torch.randn(len(x), generator=generator), table, row)
    return {
        "encode": [x, table, torch.full((wire_bytes,), 7, dtype=torch.uint8)],
        "decode": [rows[0].clone(), table, torch.full_like(x, 7.0)],
        "decode_mean": [rows, table, 3.0, torch.full_like(x, 7.0)],
        "decode_mean_encode": [rows, table, 3.0, torch.full((wire_bytes,), 7, dtype=torch.uint8)],
        "encode_feedback": [x, residual, table, torch.full((wire_bytes,), 7, dtype=torch.uint8), torch.zeros_like(x)],
    }[operation]


def launches_of(driver: PretendedDriver) -> list[Any]:
    """Return the kernel and the grid of each launch."""
    launches = [call for call in driver.calls if call[0] == "cuLaunchKernel"]
    assert all(rest == [0, STREAM, 0] for _, _, _, *rest in launches)
    return [(kernel.removeprefix("torchbagua_"), shape) for _, kernel, shape, *_ in launches]


@pytest.mark.parametrize(
    ("codec", "num_teams"), [(MINMAX_UINT8, 1), (MINMAX_UINT4, 8), (SIGN_1BIT, 2)], ids=["8 bits", "4 bits", "1 bit"]
)
def test_a_launch_has_a_team_of_threads_for_each_block(codec: Codec, num_teams: int) -> None:
    lengths = [130, 1, 16, 7, 64, 2000, 3, 9, 128]
    table, wire_bytes = lay_out(codec, lengths, seed=1)
    shape = (-(-len(lengths) // num_teams), 1, 1, launcher.THREADS, 1, 1)
    for operation in CODEC_OPERATIONS:
        for dtype in (torch.float32, torch.bfloat16) if operation in ("encode", "decode") else (torch.float32,):
            driver = PretendedDriver()
            arguments = arguments_of(operation, table, wire_bytes, dtype, codec)
            kernels_on(driver).call(f"{codec.name}_{operation}", *arguments)
            suffix = "" if operation == "decode_mean_encode" else f"_{str(dtype).split('.')[1]}"
            assert launches_of(driver) == [(f"{codec.name}_{operation}{suffix}", shape)]


# The elements of each tensor: more tensors than a table has rows, many of them empty, and a tensor of several chunks.
QADAM_LENGTHS = [0, 1, 15, 16, 0, 17, 1000, 2 * tensor_tables.CHUNK_ELEMENTS + 5, *[0] * 61, 7, 7, 0]


def qadam_lists(operation: str) -> list[list[Tensor]]:
    """Return valid lists of an operation. If dtypes other than float32 are allowed, the dtype changes midway."""
    generator = torch.Generator().manual_seed(0)

    def values(kinds: tuple[torch.dtype, ...]) -> list[Tensor]:
        found = [torch.randn(length, generator=generator) for length in QADAM_LENGTHS]
        return [tensor.to(kinds[0] if i < 6 else kinds[-1]) for i, tensor in enumerate(found)]

    if operation != "qadam_update":
        return [values((torch.float32,)), values((torch.bfloat16, torch.float32))]
    weights, gradients, momenta, second_moments = (values((torch.float16, torch.float32)) for _ in range(4))
    return [weights, gradients, momenta, [tensor.square() for tensor in second_moments]]


def qadam_launches(operation: str) -> list[tuple[str, int]]:
    """Return the kernel and grid of every launch: a table ends when the dtype changes or the table is full."""
    types = ("float16" if operation == "qadam_update" else "bfloat16", "float32", "float32")
    return [(f"torchbagua_{operation}_{dtype}", grid) for dtype, grid in zip(types, (4, 1 + 3 + 1, 1), strict=True)]


@pytest.mark.parametrize("operation", QADAM)
def test_launches_over_lists(operation: str) -> None:
    driver = PretendedDriver()
    kernels_on(driver).call(operation, *qadam_lists(operation), **QADAM[operation])
    shape = (1, 1, tensor_tables.TABLE_THREADS, 1, 1)
    expected = [(kernel.removeprefix("torchbagua_"), (grid, *shape)) for kernel, grid in qadam_launches(operation)]
    assert launches_of(driver) == expected


@pytest.mark.parametrize("operation", QADAM)
def test_empty_tensors_and_lists_launch_nothing(operation: str) -> None:
    driver = PretendedDriver()
    num_lists = len(qadam_lists(operation))
    for lists in ([[] for _ in range(num_lists)], [[torch.zeros(0)] for _ in range(num_lists)]):
        kernels_on(driver).call(operation, *lists, **QADAM[operation])
    assert driver.calls == []


@pytest.mark.parametrize("operation", QADAM)
def test_lists_are_refused_before_anything_is_called(operation: str) -> None:
    driver = PretendedDriver()
    lists = qadam_lists(operation)
    lists[-1][-2] = torch.zeros(8)
    with pytest.raises(ValueError, match=rf"^torchbagua::{operation}: \w+ must be .*, got "):
        kernels_on(driver).call(operation, *lists, **QADAM[operation])
    assert driver.calls == []


def test_launches_of_low_rank() -> None:
    for operation in low_rank.OPERATIONS:
        arguments, driver = low_rank.arguments_of(operation), PretendedDriver()
        kernels_on(driver).call(f"low_rank_{operation}", *arguments)
        grid = len(arguments[low_rank.argument_names(operation).index("table")])
        assert launches_of(driver) == [(f"low_rank_{operation}", (grid, 1, 1, launcher.THREADS, 1, 1))]


def test_kernels_are_compiled_and_loaded_once() -> None:
    driver, compiler = PretendedDriver(), PretendedCompiler()
    kernels = kernels_on(driver, compiler)
    kernels.prepare(90)
    table, wire_bytes = lay_out(MINMAX_UINT8, [5])
    for _ in range(3):
        kernels.call("minmax_uint8_encode", *arguments_of("encode", table, wire_bytes))
    kernels.load_on(1)

    assert compiler.compiled == [90]
    images = [call[1] for call in driver.calls if call[0] == "cuModuleLoadData"]
    assert [image[:6] for image in images] == [b"for 90"] * 2
    # CUDA loads a kernel when its function is requested: at once on each device, except for one that no image names.
    requested = [call[2] for call in driver.calls if call[0] == "cuModuleGetFunction"]
    gram = b"torchbagua_low_rank_gram"
    assert requested == [gram, b"torchbagua_minmax_uint8_encode_float32", gram]
    # The device's context is current only while it loads or launches.
    names = [call[0] for call in driver.calls]
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent") == 3 + 2
    assert ("cuCtxPushCurrent", "context 1") in driver.calls


@pytest.mark.parametrize("failing", ["", "cuModuleLoadData"])
def test_registered_kernels_are_loaded_before_the_first_launch(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """If they do not load, the first launch raises the error: the training may not need them."""
    driver = PretendedDriver(failing=failing)
    monkeypatch.setattr(launcher, "_registered", [kernels_on(driver)])
    loader.load_kernels(1)
    assert [call[0] for call in driver.calls].count("cuModuleLoadData") == 1
    assert ("cuCtxPushCurrent", "context 1") in driver.calls


def test_nothing_to_do_launches_nothing() -> None:
    driver = PretendedDriver()
    table = torch.zeros(0, 4, dtype=torch.int64)
    kernels_on(driver).call("minmax_uint8_encode", torch.zeros(0), table, torch.zeros(0, dtype=torch.uint8))
    assert driver.calls == []


def test_arguments_are_refused_before_anything_is_called() -> None:
    driver = PretendedDriver()
    kernels = kernels_on(driver)
    table, wire_bytes = lay_out(MINMAX_UINT8, [5])
    for operation in CODEC_OPERATIONS:
        good = arguments_of(operation, table, wire_bytes)
        elsewhere = [value.to("meta") if value is good[-1] else value for value in good]
        message = (
            rf"^torchbagua::minmax_uint8_{operation}: \w+ must be contiguous .* on (cpu|meta), got .* on (cpu|meta)$"
        )
        with pytest.raises(ValueError, match=message):
            kernels.call(f"minmax_uint8_{operation}", *elsewhere)
        strided = [torch.stack((value, value), -1)[..., 0] if value is good[-1] else value for value in good]
        with pytest.raises(ValueError, match=r"must be contiguous .*, got non-contiguous torch\."):
            kernels.call(f"minmax_uint8_{operation}", *strided)
    assert driver.calls == []


def test_old_driver_is_named() -> None:
    table, wire_bytes = lay_out(MINMAX_UINT8, [5])
    kernels = kernels_on(PretendedDriver(version=12080))
    with pytest.raises(RuntimeError, match=r"too old: it supports CUDA 12\.8, but NVRTC is from CUDA 13.*=ref"):
        kernels.call("minmax_uint8_encode", *arguments_of("encode", table, wire_bytes))


def test_failing_launch_is_an_error_and_leaves_the_context() -> None:
    table, wire_bytes = lay_out(MINMAX_UINT8, [5])
    driver = PretendedDriver(failing="cuLaunchKernel")
    with pytest.raises(RuntimeError, match="cuLaunchKernel of the CUDA driver failed: CUDA_ERROR_LAUNCH_FAILED"):
        kernels_on(driver).call("minmax_uint8_encode", *arguments_of("encode", table, wire_bytes))
    assert driver.calls[-1] == ("cuCtxPopCurrent",)


def test_a_table_of_more_rows_than_a_grid_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PretendedDriver()
    table, wire_bytes = lay_out(MINMAX_UINT8, [5] * 4)
    monkeypatch.setattr(launcher, "LARGEST_GRID", 3)
    kernels_on(driver).call("minmax_uint8_encode", *arguments_of("encode", table, wire_bytes))
    assert driver.calls[-2][2][0] == 3
