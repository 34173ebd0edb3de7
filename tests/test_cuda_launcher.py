"""The launcher of the NVRTC kernels and its calls of the driver; a fake driver runs the kernels on the host."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import low_rank
from host_kernels import KERNEL_FILES, HostKernels, QAdamForm, QAdamStep, Rows, Span, source_of
from native_codecs import (
    DTYPES,
    MINMAX_UINT4,
    MINMAX_UINT8,
    SIGN_1BIT,
    Codec,
    assert_same_values,
    lay_out,
    num_elements,
)
from torchbagua.native import launcher, loader, nvrtc, tensor_tables
from torchbagua.native.launcher import CudaKernels, Driver
from torchbagua.native.ops import NATIVE_OPS

CODEC_OPERATIONS = ("encode", "decode", "decode_mean", "decode_mean_encode", "encode_feedback")
STREAM = 77
TILE = 2048  # elements per thread block


class CUresult(Enum):
    """The results that the fake driver returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_LAUNCH_FAILED = 719


def parameters_of(kernel: str) -> list[str]:
    """Return the types of a kernel's parameters, as its source declares them."""
    (declared,) = re.findall(rf"\b{kernel}\(([^)]*)\)", "\n".join(map(source_of, KERNEL_FILES)))
    return [re.sub(r"\s*\w+$", "", parameter.strip()) for parameter in declared.split(",")]


def c_type_of(parameter: str) -> Any:
    """Return the ctypes type of a parameter that is declared with this type."""
    if parameter.startswith("Span<"):
        return Span
    if parameter.startswith(("RowTable<", "Grid<")):
        return Rows
    for name, num_pointers in {"QAdamTensors<": 4, "FormTensors<": 2}.items():
        if name in parameter:
            return tensor_tables.table_type(num_pointers)
    c_types = {"Rows": Rows, "Table": Rows, "float": ctypes.c_float, "QAdamStep": QAdamStep, "QAdamForm": QAdamForm}
    return c_types[parameter]


def run_on_host(host: HostKernels, kernel: str, num_blocks: int, num_threads: int, parameters: int) -> None:
    """Run a kernel; the addresses of its arguments are at the address `parameters`, as a launch passes them."""
    kinds = [c_type_of(parameter) for parameter in parameters_of(kernel)]
    places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
    values = [kind.from_address(place) for kind, place in zip(kinds, places, strict=True)]
    ended = host.run(kernel, *values, blocks=range(num_blocks), num_blocks=num_blocks, num_threads=num_threads)
    assert ended == "done"


@dataclass
class PretendedDriver:
    """A fake `cuda.bindings.driver` that runs kernels on the host: a module is its image, a function its kernel's name.

    Attributes:
        host: the kernels; None to launch nothing.
        version: CUDA's version, as the driver encodes it.
        calls: the called functions with their arguments, and the shape of every launch.
    """

    host: HostKernels | None = None
    version: int = 13010
    capabilities: tuple[int, ...] = (90, 90)
    failing: str = ""
    calls: list[Any] = field(default_factory=list)
    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )

    def __getattr__(self, function: str) -> Callable[..., tuple[Any, ...]]:
        answers = {
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDeviceGet": lambda device: (device,),
            "cuDeviceGetAttribute": lambda part, device: (
                self.capabilities[device] // 10 if part == "major" else self.capabilities[device] % 10,
            ),
            "cuDevicePrimaryCtxRetain": lambda device: (f"context {device}",),
            "cuModuleLoadData": lambda image: (image,),
            "cuModuleGetFunction": lambda module, name: (name.decode(),),
            "cuCtxPushCurrent": lambda context: (),
            "cuCtxPopCurrent": lambda: ("a context",),
            "cuLaunchKernel": self._launch,
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            if function != "cuLaunchKernel":
                self.calls.append((function, *arguments))
            if function == self.failing:
                return (CUresult.CUDA_ERROR_LAUNCH_FAILED,)
            return (CUresult.CUDA_SUCCESS, *answers[function](*arguments))

        return call

    def _launch(self, kernel: str, *rest: int) -> tuple[()]:
        *shape, shared_bytes, stream, parameters, extra = rest
        self.calls.append(("cuLaunchKernel", kernel, tuple(shape), shared_bytes, stream, extra))
        if self.host is not None:
            run_on_host(self.host, kernel, shape[0], shape[3], parameters)
        return ()


class PretendedCompiler:
    """A fake of NVRTC's compiler: an image names its compute capability."""

    def __init__(self) -> None:
        self.version = "13.0"
        self.compiled: list[int] = []

    def image_for(self, capability: int) -> bytes:
        self.compiled.append(capability)
        return f"for {capability} .text.torchbagua_low_rank_gram\0.text.torchbagua_low_rank_gram\0".encode()


def kernels_on(driver: PretendedDriver, compiler: PretendedCompiler | None = None) -> CudaKernels:
    bindings = cast(Any, driver)
    return CudaKernels(cast(nvrtc.Compiler, compiler or PretendedCompiler()), Driver(bindings, lambda _: STREAM))


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


def copies(arguments: list[Any]) -> list[Any]:
    return [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]


def check_same(mine: list[Any], theirs: list[Any]) -> None:
    """Check that two operations have left equal values in their arguments, of which `theirs` were copies."""
    for own, expected in zip(mine, theirs, strict=True):
        if isinstance(own, Tensor) and own.is_floating_point():
            assert_same_values(own, expected)
        elif isinstance(own, Tensor):
            assert torch.equal(own, expected)


def kernel_of(operation: str, dtype: torch.dtype, codec: Codec = MINMAX_UINT8) -> str:
    """Return the name of the kernel that the operation launches."""
    suffix = "" if operation == "decode_mean_encode" else f"_{str(dtype).split('.')[1]}"
    return f"torchbagua_{codec.name}_{operation}{suffix}"


CASES = [(operation, torch.float32) for operation in CODEC_OPERATIONS]
CASES += [(operation, dtype) for operation in ("encode", "decode") for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("operation", "dtype"), CASES)
@pytest.mark.parametrize("lengths", [[130, 1, 16, 7, 64, 2000, 3, 9, 128], [3 * TILE, 5000]])
@pytest.mark.parametrize(
    ("codec", "num_teams"), [(MINMAX_UINT8, 1), (MINMAX_UINT4, 8), (SIGN_1BIT, 2)], ids=["8 bits", "4 bits", "1 bit"]
)
def test_launches_give_the_bytes_of_the_reference(
    host_kernels: HostKernels, codec: Codec, num_teams: int, operation: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    table, wire_bytes = lay_out(codec, lengths, seed=1)
    mine = arguments_of(operation, table, wire_bytes, dtype, codec)
    theirs = copies(mine)
    driver = PretendedDriver(host_kernels)

    kernels_on(driver).call(f"{codec.name}_{operation}", *mine)

    NATIVE_OPS[f"{codec.name}_{operation}"](*theirs)
    check_same(mine, theirs)
    name, kernel, shape, *rest = driver.calls[-2]
    assert (name, kernel) == ("cuLaunchKernel", kernel_of(operation, dtype, codec))
    assert (shape, rest) == ((-(-len(lengths) // num_teams), 1, 1, launcher.THREADS, 1, 1), [0, STREAM, 0])


# The elements of each tensor: more tensors than a table has rows, many of them empty, and a tensor of several chunks.
QADAM_LENGTHS = [0, 1, 15, 16, 0, 17, 1000, 2 * tensor_tables.CHUNK_ELEMENTS + 5, *[0] * 61, 7, 7, 0]
QADAM_NUMBERS = {
    "qadam_update": {
        "gradient_sign": -1.0,
        "weight_decay": 0.1,
        "shrink": 0.99,
        "beta1": 0.9,
        "root_correction2": 0.3,
        "eps": 1e-8,
        "largest_ratio": 0.7,
        "step_size": 1e-3,
    },
    "qadam_form_momenta": {"beta1": 0.9, "share": 0.1 / 1024},
    "qadam_form_gradients": {"beta1": 0.9, "share": 0.1 / 1024},
}


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


@pytest.mark.parametrize("operation", QADAM_NUMBERS)
def test_launches_over_lists_are_bitwise_equal_to_the_reference(host_kernels: HostKernels, operation: str) -> None:
    mine, numbers = qadam_lists(operation), QADAM_NUMBERS[operation]
    theirs = [copies(tensors) for tensors in mine]
    driver = PretendedDriver(host_kernels)

    kernels_on(driver).call(operation, *mine, **numbers)

    NATIVE_OPS[operation](*theirs, **numbers)
    for own, expected in zip(mine, theirs, strict=True):
        check_same(own, expected)
    shape = (1, 1, tensor_tables.TABLE_THREADS, 1, 1)
    assert [call for call in driver.calls if call[0] == "cuLaunchKernel"] == [
        ("cuLaunchKernel", kernel, (grid, *shape), 0, STREAM, 0) for kernel, grid in qadam_launches(operation)
    ]


@pytest.mark.parametrize("operation", QADAM_NUMBERS)
def test_empty_tensors_and_lists_launch_nothing(operation: str) -> None:
    driver = PretendedDriver()
    num_lists = len(qadam_lists(operation))
    for lists in ([[] for _ in range(num_lists)], [[torch.zeros(0)] for _ in range(num_lists)]):
        kernels_on(driver).call(operation, *lists, **QADAM_NUMBERS[operation])
    assert driver.calls == []


@pytest.mark.parametrize("operation", QADAM_NUMBERS)
def test_lists_are_refused_before_anything_is_called(operation: str) -> None:
    driver = PretendedDriver()
    lists = qadam_lists(operation)
    lists[-1][-2] = torch.zeros(8)
    with pytest.raises(ValueError, match=rf"^torchbagua::{operation}: \w+ must be .*, got "):
        kernels_on(driver).call(operation, *lists, **QADAM_NUMBERS[operation])
    assert driver.calls == []


@pytest.mark.parametrize("operation", low_rank.OPERATIONS)
def test_launches_of_low_rank(host_kernels: HostKernels, operation: str) -> None:
    mine = low_rank.arguments_of(operation)
    theirs = copies(mine)
    driver = PretendedDriver(host_kernels)

    kernels_on(driver).call(f"low_rank_{operation}", *mine)

    NATIVE_OPS[f"low_rank_{operation}"](*theirs)
    check_same(mine, theirs)
    grid = len(mine[low_rank.argument_names(operation).index("table")])
    launch = (f"torchbagua_low_rank_{operation}", (grid, 1, 1, launcher.THREADS, 1, 1), 0, STREAM, 0)
    assert driver.calls[-2] == ("cuLaunchKernel", *launch)


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
