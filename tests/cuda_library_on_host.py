"""Runs the tests of native operations over a library of bind_cuda.cu and pretended_cuda_runtime.cpp.

python cuda_library_on_host.py LIBRARY KERNELS: the kernels run on the host. Prints pytest's report, and the errors of
launches that fail. It needs a separate process: the operations stay registered with torch.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import backends
import torchbagua  # noqa: F401  the schemas
from devices import CPU, on_device
from host_kernels import HostKernels
from pretended_driver import run_on_host

LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
NO_KERNEL_IMAGE, INSUFFICIENT_DRIVER, LAUNCH_FAILURE = 209, 35, 719
# With the compute capability of the GPU in each.
FAILURES = ((NO_KERNEL_IMAGE, 70), (NO_KERNEL_IMAGE, 103), (INSUFFICIENT_DRIVER, 90), (LAUNCH_FAILURE, 90))
TESTS = "host and (refus or qadam or low_rank or (minmax_uint8 and (values or means)))"


class LibraryOperation:
    """An operation with the dispatch key of CUDA tensors, for CPU tensors."""

    def __init__(self, name: str, errors: list[Exception]) -> None:
        self._operation = getattr(torch.ops.torchbagua, name).default
        self._schema, self._errors = self._operation._schema, errors

    def __call__(self, **arguments: Any) -> None:
        in_order = [arguments.pop(argument.name) for argument in self._schema.arguments if not argument.kwarg_only]
        self._operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *in_order, **arguments)
        while self._errors:
            raise self._errors.pop()


def main(library: Path, kernels: Path) -> None:
    torch.ops.load_library(library)
    runtime, host, errors = ctypes.CDLL(str(library)), HostKernels(kernels), list[Exception]()
    device = ctypes.c_int.in_dll(runtime, "pretended_device")

    def launch(name: bytes, grid: int, threads: int, parameters: int, stream: int) -> None:
        try:
            assert (stream, device.value) == (1000, 0), "on torch's stream and the device of the tensors"
            run_on_host(host, name.decode(), grid, threads, parameters)
        except Exception as error:  # C++ would ignore it
            errors.append(error)

    callback = LAUNCH(launch)
    ctypes.c_void_p.in_dll(runtime, "pretended_launch").value = ctypes.cast(callback, ctypes.c_void_p).value
    assert runtime.pretended_num_loaded() == 0
    assert runtime.torchbagua_load_kernels(0) == runtime.pretended_num_kernels() == runtime.pretended_num_loaded() > 0

    operation = functools.partial(LibraryOperation, errors=errors)
    backends.backend_of = lambda request: backends.Backend("host", lambda name: on_device(operation(name), CPU))  # type: ignore[arg-type]
    files = [str(Path(__file__).with_name(f"test_native_{part}.py")) for part in ("kernels", "operations", "refusals")]
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-k", TESTS, *files])
    assert status == 0
    assert device.value == -1, "the guard has let go"
    arguments = torch.zeros(5), torch.tensor([[0, 5, 0, 8]]), torch.zeros(13, dtype=torch.uint8)
    for error, capability in FAILURES:
        ctypes.c_int.in_dll(runtime, "pretended_error").value = error
        ctypes.c_int.in_dll(runtime, "pretended_capability").value = capability
        with pytest.raises(RuntimeError) as caught:
            operation("minmax_uint8_encode")(**dict(zip(("x", "table", "wire"), arguments, strict=True)))
        print(caught.value)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
