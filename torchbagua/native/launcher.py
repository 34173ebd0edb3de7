"""The CUDA kernels that NVRTC compiles, as operations on torch's dispatcher: what bind_cuda.cu is in C++."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchbagua.native.cuda_driver import Argument, Driver, LoadedKernels
from torchbagua.native.nvrtc import Compiler
from torchbagua.native.schema import (
    check_codec,
    check_feedback,
    check_forms,
    check_mean,
    check_mean_encode,
    check_qadam,
)
from torchbagua.native.tensor_tables import TABLE_THREADS, QAdamStep, tables_of

# As in csrc_cuda/kernels/blocks.cuh and cuda/launch.h: a thread block for each row of the table, up to so many.
THREADS = 64
LARGEST_GRID = 2**31 - 1

_TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class CudaKernels:
    """The kernels of all devices; an operation's arguments are those of schema.py.

    Args:
        compiler: what compiles them, once for each compute capability.
        driver: what runs them.
    """

    def __init__(self, compiler: Compiler, driver: Driver) -> None:
        self._compiler = compiler
        self._driver = driver
        self._lock = threading.Lock()
        self._images: dict[int, bytes] = {}
        self._loaded: dict[int, LoadedKernels] = {}

    def prepare(self, capability: int) -> None:
        """Compiles for a compute capability, 90 for 9.0, ahead of the first launch; RuntimeError where NVRTC fails."""
        with self._lock:
            self._image(capability)

    def register(self) -> None:
        """Makes torch call these kernels for CUDA tensors, for as long as the process lasts."""
        kernels: list[Callable[..., None]] = [
            self.minmax_uint8_encode,
            self.minmax_uint8_decode,
            self.minmax_uint8_decode_mean,
            self.minmax_uint8_decode_mean_encode,
            self.minmax_uint8_encode_feedback,
            self.qadam_update,
            self.qadam_form_momenta,
            self.qadam_form_gradients,
        ]
        for kernel in kernels:
            torch.library.impl(f"torchbagua::{kernel.__name__}", "cuda", kernel)

    def minmax_uint8_encode(self, x: Tensor, table: Tensor, wire: Tensor) -> None:
        """`torchbagua::minmax_uint8_encode`, see schema.py."""
        operation = "minmax_uint8_encode"
        check_codec(operation, x, table, wire)
        kernel = f"{operation}_{_TYPE_NAMES[x.dtype]}"
        self._launch(kernel, table, x, x.numel(), table, len(table), wire, wire.numel())

    def minmax_uint8_decode(self, wire: Tensor, table: Tensor, x: Tensor) -> None:
        """`torchbagua::minmax_uint8_decode`, see schema.py."""
        operation = "minmax_uint8_decode"
        check_codec(operation, x, table, wire)
        kernel = f"{operation}_{_TYPE_NAMES[x.dtype]}"
        self._launch(kernel, table, wire, wire.numel(), table, len(table), x, x.numel())

    def minmax_uint8_decode_mean(self, rows: Tensor, table: Tensor, divisor: float, x: Tensor) -> None:
        """`torchbagua::minmax_uint8_decode_mean`, see schema.py."""
        operation = "minmax_uint8_decode_mean"
        check_mean(operation, rows, table, divisor, x)
        senders = (rows, *rows.shape, float(divisor))
        self._launch(operation, table, *senders, table, len(table), x, x.numel())

    def minmax_uint8_decode_mean_encode(self, rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
        """`torchbagua::minmax_uint8_decode_mean_encode`, see schema.py."""
        operation = "minmax_uint8_decode_mean_encode"
        check_mean_encode(operation, rows, table, divisor, wire)
        senders = (rows, *rows.shape, float(divisor))
        self._launch(operation, table, *senders, table, len(table), wire)

    def minmax_uint8_encode_feedback(
        self, x: Tensor, residual: Tensor, table: Tensor, wire: Tensor, left_out: Tensor
    ) -> None:
        """`torchbagua::minmax_uint8_encode_feedback`, see schema.py."""
        operation = "minmax_uint8_encode_feedback"
        check_feedback(operation, x, residual, table, wire, left_out)
        sums = (x, residual, x.numel())
        self._launch(operation, table, *sums, table, len(table), wire, wire.numel(), left_out)

    def qadam_update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        second_moments: list[Tensor],
        **numbers: float,
    ) -> None:
        """`torchbagua::qadam_update`, see schema.py."""
        check_qadam(weights, gradients=gradients, momenta=momenta, second_moments=second_moments)
        step = QAdamStep(one_minus_beta1=1.0 - numbers["beta1"], **numbers)
        self._launch_tables("qadam_update", (weights, gradients, momenta, second_moments), weights, step)

    def qadam_form_momenta(self, gradients: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
        """`torchbagua::qadam_form_momenta`, see schema.py."""
        check_forms("qadam_form_momenta", "gradients", gradients, momenta)
        numbers = (ctypes.c_float(beta1), ctypes.c_float(share))
        self._launch_tables("qadam_form_momenta", (gradients, momenta), momenta, *numbers)

    def qadam_form_gradients(
        self, averages: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float
    ) -> None:
        """`torchbagua::qadam_form_gradients`, see schema.py."""
        check_forms("qadam_form_gradients", "averages", averages, momenta)
        numbers = (ctypes.c_float(beta1), ctypes.c_float(share))
        self._launch_tables("qadam_form_gradients", (averages, momenta), momenta, *numbers)

    def _launch(self, kernel: str, table: Tensor, *arguments: Tensor | int | float) -> None:
        """Launches over the rows of `table`, where that is."""
        self._launch_blocks(kernel, table, len(table), THREADS, [_argument(one) for one in arguments])

    def _launch_tables(
        self, operation: str, lists: Sequence[list[Tensor]], kinds: list[Tensor], *numbers: Argument
    ) -> None:
        """Launches over the tensors of `lists`, by kernels for the element types of `kinds`, one of them."""
        for table, first in tables_of(lists, kinds):
            kernel = f"{operation}_{_TYPE_NAMES[first.dtype]}"
            self._launch_blocks(kernel, first, table.num_chunks, TABLE_THREADS, [table, *numbers])

    def _launch_blocks(
        self, kernel: str, there: Tensor, num_blocks: int, num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """Launches thread blocks where the tensor `there` is; none is nothing to do."""
        if num_blocks == 0:
            return
        kernels = self._on(there.get_device())
        self._driver.launch(kernels, f"torchbagua_{kernel}", min(num_blocks, LARGEST_GRID), num_threads, arguments)

    def _on(self, device: int) -> LoadedKernels:
        """The kernels on a device, compiled and loaded when first asked for."""
        loaded = self._loaded.get(device)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(device)
                if loaded is None:
                    self._driver.require_version(self._compiler.version)
                    image = self._image(self._driver.capability(device))
                    loaded = self._loaded[device] = self._driver.load(device, image)
        return loaded

    def _image(self, capability: int) -> bytes:
        if capability not in self._images:
            self._images[capability] = self._compiler.image_for(capability)
        return self._images[capability]


def _argument(value: Tensor | int | float) -> Argument:
    """As the kernels declare it: pointers, `long long` counts, a `float` divisor."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_longlong(value) if isinstance(value, int) else ctypes.c_float(value)
