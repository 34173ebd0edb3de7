"""Calls the operations of a library of bind_cuda.cu and pretended_cuda_runtime.cpp, with the kernels on the host.

python cuda_library_on_host.py LIBRARY KERNELS: prints a line for every call whose bytes are equal to the reference's
and for every argument that is refused, then the errors of launches that fail. It needs a separate process: the
operations stay registered with torch.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import low_rank
import torchbagua  # noqa: F401  the schemas
from devices import CPU
from host_kernels import HostKernels
from native_codecs import DTYPES, MINMAX_UINT8, assert_same_values, lay_out
from pretended_driver import run_on_host
from test_cuda_launcher import CODEC_OPERATIONS, QADAM_NUMBERS, arguments_of, qadam_launches, qadam_lists
from test_native_refusals import OPERATIONS, good_arguments, spoiled
from torchbagua.native import launcher, tensor_tables
from torchbagua.native.ops import NATIVE_OPS

LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
NO_KERNEL_IMAGE, INSUFFICIENT_DRIVER, LAUNCH_FAILURE = 209, 35, 719
# With the compute capability of the GPU in each.
FAILURES = ((NO_KERNEL_IMAGE, 70), (NO_KERNEL_IMAGE, 103), (INSUFFICIENT_DRIVER, 90), (LAUNCH_FAILURE, 90))


CASES = [(operation, torch.float32) for operation in CODEC_OPERATIONS]
CASES += [(operation, dtype) for operation in ("encode", "decode") for dtype in DTYPES[1:]]


def kernel_of(operation: str, dtype: torch.dtype) -> str:
    """Return the name of the kernel that the operation launches."""
    suffix = "" if operation == "decode_mean_encode" else f"_{str(dtype).split('.')[1]}"
    return f"torchbagua_minmax_uint8_{operation}{suffix}"


def copies(arguments: list[Any]) -> list[Any]:
    return [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]


def check_same(mine: list[Any], theirs: list[Any]) -> None:
    """Check that two operations have left equal values in their arguments, of which `theirs` were copies."""
    for own, expected in zip(mine, theirs, strict=True):
        if isinstance(own, Tensor) and own.is_floating_point():
            assert_same_values(own, expected)
        elif isinstance(own, Tensor):
            assert torch.equal(own, expected)


def call(operation: str, arguments: list[object], **numbers: float) -> None:
    """Call an operation with the dispatch key of CUDA tensors."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    getattr(torch.ops.torchbagua, operation).default.redispatch(keys, *arguments, **numbers)


def refusal_of(kernel: Callable[..., None], *arguments: object, **numbers: float) -> str:
    """Return the error about an argument, up to "got", and with "cpu" as the device if the library names cuda:3."""
    try:
        kernel(*arguments, **numbers)
    except ValueError as error:
        return str(error).split(", got")[0].replace("cuda:3", "cpu")
    raise AssertionError("it was not refused")


def check_refusals() -> None:
    """Check that every invalid argument is refused with the message of plain torch; print the arguments' names."""
    for operation in OPERATIONS:
        good = good_arguments(MINMAX_UINT8, operation)
        name = f"minmax_uint8_{operation}"
        if NATIVE_OPS[name].is_cpu_only:
            continue
        for argument in good:
            # No tensors on another device: here a GPU's tensors are the CPU's.
            for bad in [0.0] if argument == "divisor" else [x for x in spoiled(argument, good) if x.device == CPU]:
                arguments = list({**good, argument: bad}.values())
                message = refusal_of(call, name, arguments)
                assert message == refusal_of(NATIVE_OPS[name], *arguments)
                assert message.startswith(f"torchbagua::{name}: {argument} must be ")
            print(f"refused {operation} {argument}")
    for operation in low_rank.OPERATIONS:
        name, good = f"low_rank_{operation}", low_rank.arguments_of(operation)
        for index, argument in enumerate(low_rank.argument_names(operation)):
            arguments = [*good[:index], good[index].to(torch.int16), *good[index + 1 :]]
            message = refusal_of(call, name, arguments)
            assert message.startswith(f"torchbagua::{name}: {argument} must be "), message
            assert refusal_of(NATIVE_OPS[name], *arguments).startswith(message.split(" must be ")[0])
            print(f"refused {name} {argument}")
    for name, numbers in QADAM_NUMBERS.items():
        schema = getattr(torch.ops.torchbagua, name).default._schema
        for index, _ in enumerate(qadam_lists(name)):
            lists = qadam_lists(name)
            lists[index][-1] = lists[index][-1].to(torch.int16)
            argument = schema.arguments[index].name
            message = refusal_of(call, name, lists, **numbers)
            assert message.startswith(f"torchbagua::{name}: {argument} must be "), message
            assert refusal_of(NATIVE_OPS[name], *lists, **numbers).startswith(message.split(" must be ")[0])
            print(f"refused {name} {argument}")


def main(library: Path, kernels: Path) -> None:
    torch.ops.load_library(library)
    runtime, host = ctypes.CDLL(str(library)), HostKernels(kernels)
    device = ctypes.c_int.in_dll(runtime, "pretended_device")
    launches = []

    def launch(name: bytes, grid: int, threads: int, parameters: int, stream: int) -> None:
        launches.append((name.decode(), grid, threads, stream, device.value))
        run_on_host(host, name.decode(), grid, threads, parameters)

    callback = LAUNCH(launch)
    ctypes.c_void_p.in_dll(runtime, "pretended_launch").value = ctypes.cast(callback, ctypes.c_void_p).value

    assert runtime.pretended_num_loaded() == 0
    assert runtime.torchbagua_load_kernels(3) == runtime.pretended_num_kernels() == runtime.pretended_num_loaded() > 0
    for lengths in ([130, 1, 16, 7, 64, 2000, 3], [3 * 2048, 5000]):
        table, wire_bytes = lay_out(MINMAX_UINT8, lengths, seed=1)
        for operation, dtype in CASES:
            actual = arguments_of(operation, table, wire_bytes, dtype)
            reference = copies(actual)
            call(f"minmax_uint8_{operation}", actual)
            NATIVE_OPS[f"minmax_uint8_{operation}"](*reference)
            check_same(actual, reference)
            (launched,) = launches
            expected = (kernel_of(operation, dtype), len(lengths), launcher.THREADS, 1003, 3)
            assert launched == expected, (launched, expected)
            launches.clear()
            print(operation, str(dtype))

    for operation, numbers in QADAM_NUMBERS.items():
        lists = qadam_lists(operation)
        of_reference = [copies(tensors) for tensors in lists]
        call(operation, lists, **numbers)
        NATIVE_OPS[operation](*of_reference, **numbers)
        for actual, reference in zip(lists, of_reference, strict=True):
            check_same(actual, reference)
        expected = [(*kernel, tensor_tables.TABLE_THREADS, 1003, 3) for kernel in qadam_launches(operation)]
        assert launches == expected, (launches, expected)
        launches.clear()
        call(operation, [[torch.zeros(0)] for _ in lists], **numbers)
        assert not launches
        print(operation)

    for operation in low_rank.OPERATIONS:
        actual = low_rank.arguments_of(operation)
        reference = copies(actual)
        call(f"low_rank_{operation}", actual)
        NATIVE_OPS[f"low_rank_{operation}"](*reference)
        check_same(actual, reference)
        grid = len(actual[low_rank.argument_names(operation).index("table")])
        assert launches == [(f"torchbagua_low_rank_{operation}", grid, launcher.THREADS, 1003, 3)], launches
        launches.clear()
        print(f"low_rank_{operation}")

    check_refusals()
    assert not launches
    assert device.value == -1, "the guard has let go"
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    call("minmax_uint8_encode", [torch.zeros(0), nothing, torch.zeros(0, dtype=torch.uint8)])
    assert not launches
    table, wire_bytes = lay_out(MINMAX_UINT8, [5])
    for error, capability in FAILURES:
        ctypes.c_int.in_dll(runtime, "pretended_error").value = error
        ctypes.c_int.in_dll(runtime, "pretended_capability").value = capability
        try:
            call("minmax_uint8_encode", arguments_of("encode", table, wire_bytes))
        except RuntimeError as caught:
            print(caught)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
