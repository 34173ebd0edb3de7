"""Where native operations run: on the CPU, on a GPU (tests marked `gpu`), and CUDA's kernels compiled for the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from devices import CPU, load_kernels, on_device, require_gpu
from pretended_driver import HostOperation
from torchbagua.native.ops import NATIVE_OPS

OPS = torch.ops.torchbagua
# The parameters of a fixture of module scope, which calls `backend_of`.
BACKENDS = ("cpu", "host", pytest.param("gpu", marks=pytest.mark.gpu))


class Backend(NamedTuple):
    """A device with native kernels; its operations take CPU tensors, and run on copies of them between guards."""

    name: str
    kernel: Callable[[str], Callable[..., None]]

    def has(self, operation: str) -> bool:
        """Return whether the operation is more than the plain torch that it is compared with."""
        return self.name == "cpu" or not NATIVE_OPS[operation].is_cpu_only


def backend_of(request: pytest.FixtureRequest) -> Backend:
    """Return the backend that the parameter of a fixture names, with its kernels loaded."""
    if request.param == "host":
        host = request.getfixturevalue("host_kernels")
        return Backend("host", lambda name: on_device(HostOperation(host, name), CPU))  # type: ignore[arg-type]
    device = CPU if request.param == "cpu" else require_gpu()
    load_kernels(device)

    def kernel(name: str) -> Callable[..., Any]:
        return on_device(getattr(OPS, name).default, device)

    return Backend(request.param, kernel)
