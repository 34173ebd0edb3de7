"""The launcher of the NVRTC kernels and its calls of the driver; test_native_kernels.py compares what they compute."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from native_codecs import MINMAX_UINT4, MINMAX_UINT8, QADAM, SIGN_1BIT, Codec, lay_out, num_elements
from pretended_driver import STREAM, PretendedCompiler, PretendedDriver, kernels_on
from torchbagua.native import launcher, loader, tensor_tables


@pytest.fixture(autouse=True)
def _first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors on the CPU report device 0."""
    monkeypatch.setattr(Tensor, "get_device", lambda self: max(self.device.index or 0, 0))


def encode_arguments(codec: Codec = MINMAX_UINT8, lengths: Sequence[int] = (5,)) -> list[Tensor]:
    table, wire_bytes = lay_out(codec, list(lengths))
    return [torch.randn(num_elements(table)), table, torch.zeros(wire_bytes, dtype=torch.uint8)]


def shapes_of(operation: str, *arguments: Any, **numbers: float) -> list[tuple[int, ...]]:
    """Call an operation; return the grid and thread block of each launch."""
    driver = PretendedDriver()
    kernels_on(driver).call(operation, *arguments, **numbers)
    launches = [call for call in driver.calls if call[0] == "cuLaunchKernel"]
    assert all(rest == [0, STREAM, 0] for _, _, _, *rest in launches)
    assert launches or not driver.calls
    return [shape for _, _, shape, *_ in launches]


@pytest.mark.parametrize(
    ("codec", "num_teams"), [(MINMAX_UINT8, 1), (MINMAX_UINT4, 8), (SIGN_1BIT, 2)], ids=["8 bits", "4 bits", "1 bit"]
)
def test_a_launch_has_a_team_of_threads_for_each_block(
    codec: Codec, num_teams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = encode_arguments(codec, [130, 1, 16, 7, 64, 2000, 3, 9, 128])
    threads = (1, 1, launcher.THREADS, 1, 1)
    assert shapes_of(f"{codec.name}_encode", *arguments) == [(-(-9 // num_teams), *threads)]
    monkeypatch.setattr(launcher, "LARGEST_GRID", 1)
    assert shapes_of(f"{codec.name}_encode", *arguments) == [(1, *threads)]
    nothing = torch.zeros(0), arguments[1][:0], torch.zeros(0, dtype=torch.uint8)
    assert shapes_of(f"{codec.name}_encode", *nothing) == []


@pytest.mark.parametrize("operation", QADAM)
def test_launches_over_lists(operation: str) -> None:
    """A table ends when the dtype changes or the table is full; empty tensors and lists launch nothing."""
    lengths = [0, 1, 15, 16, 0, 17, 1000, 2 * tensor_tables.CHUNK_ELEMENTS + 5, *[0] * 61, 7, 7, 0]
    dtypes = [torch.bfloat16 if index < 6 else torch.float32 for index in range(len(lengths))]
    mixed = [torch.ones(length, dtype=dtype) for length, dtype in zip(lengths, dtypes, strict=True)]
    lists = [mixed] * 4 if operation == "qadam_update" else [[tensor.float() for tensor in mixed], mixed]
    shapes = shapes_of(operation, *lists, **QADAM[operation])
    assert shapes == [(grid, 1, 1, tensor_tables.TABLE_THREADS, 1, 1) for grid in (4, 1 + 3 + 1, 1)]
    for empty in ([], [torch.zeros(0)]):
        assert shapes_of(operation, *[empty for _ in lists], **QADAM[operation]) == []


def test_kernels_are_compiled_and_loaded_once() -> None:
    driver, compiler = PretendedDriver(), PretendedCompiler()
    kernels = kernels_on(driver, compiler)
    kernels.prepare(90)
    for _ in range(3):
        kernels.call("minmax_uint8_encode", *encode_arguments())
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


def test_errors_of_the_driver() -> None:
    kernels = kernels_on(PretendedDriver(version=12080))
    with pytest.raises(RuntimeError, match=r"too old: it supports CUDA 12\.8, but NVRTC is from CUDA 13.*=ref"):
        kernels.call("minmax_uint8_encode", *encode_arguments())
    driver = PretendedDriver(failing="cuLaunchKernel")
    with pytest.raises(RuntimeError, match="cuLaunchKernel of the CUDA driver failed: CUDA_ERROR_LAUNCH_FAILED"):
        kernels_on(driver).call("minmax_uint8_encode", *encode_arguments())
    assert driver.calls[-1] == ("cuCtxPopCurrent",), "the context is left"
