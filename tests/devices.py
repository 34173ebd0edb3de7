"""The devices on which tests run native operations: the CPU and, in tests marked `gpu`, the first GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbagua import native
from torchbagua.runtime import parameter_state

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ALIGNMENT_BYTES = 16  # of a kernel's widest access
GUARD_BYTES = 16 * ALIGNMENT_BYTES
GUARD = 0xA5


def require_gpu() -> torch.device:
    """Return the first GPU; skip the test if torch can use no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that this torch can use")
    return GPU


def load_kernels(device: torch.device, prefix: str = "") -> None:
    """Load the native kernels; fail if an operation on `device` whose name begins with `prefix` has none."""
    native.load()
    rows = [row for row in native.status() if row.device == device.type and row.operation.startswith(prefix)]
    assert rows
    assert not [row for row in rows if row.path == "reference"], rows


def decide_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide what a step commits as on a GPU, where reading a value would block."""
    monkeypatch.setattr(parameter_state, "requires_host_sync", lambda tensor: True)


class GuardedCopy:
    """A copy of a tensor on `device`, as far from an aligned address as the original, between guard bytes.

    Attributes:
        tensor: the copy, of the original's shape and strides.
    """

    def __init__(self, original: Tensor, device: torch.device) -> None:
        steps = [(size - 1) * stride for size, stride in zip(original.shape, original.stride(), strict=True)]
        num_bytes = original.itemsize * (1 + sum(steps)) if original.numel() else 0
        first = GUARD_BYTES + original.data_ptr() % ALIGNMENT_BYTES
        memory = torch.full((first + num_bytes + GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        assert memory.data_ptr() % ALIGNMENT_BYTES == 0
        self._guards = memory[:first], memory[first + num_bytes :]
        flat = memory[first : first + num_bytes].view(original.dtype)
        self.tensor = flat.as_strided(original.size(), original.stride())
        self.tensor.copy_(original)

    def check_guards(self, name: str) -> None:
        """Fail if something was written outside the tensor called `name`."""
        assert all((guard == GUARD).all() for guard in self._guards), f"written outside {name}"


def on_device(operation: torch._ops.OpOverload, device: torch.device) -> Callable[..., None]:
    """Return `operation` for CPU tensors: it runs on guarded copies on `device`, and written tensors are copied back.

    Tensors that are not on the CPU are passed unchanged.
    """
    schema = operation._schema.arguments

    def copy_of(value: Any) -> Any:
        if isinstance(value, list):
            return [copy_of(item) for item in value]
        if isinstance(value, Tensor) and value.device == CPU:
            return GuardedCopy(value, device)
        return value

    def inside(value: Any) -> Any:
        if isinstance(value, list):
            return [inside(item) for item in value]
        return value.tensor if isinstance(value, GuardedCopy) else value

    def copy_back(original: Any, copy: Any, name: str, *, is_written: bool) -> None:
        if isinstance(copy, list):
            for index, (item, item_copy) in enumerate(zip(original, copy, strict=True)):
                copy_back(item, item_copy, f"{name}[{index}]", is_written=is_written)
        elif isinstance(copy, GuardedCopy):
            copy.check_guards(name)
            if is_written:
                original.copy_(copy.tensor)

    def run(*positional: Any, **named: Any) -> None:
        names = [argument.name for argument in schema][: len(positional)]
        originals = dict(zip(names, positional, strict=True)) | named
        copies = {name: copy_of(value) for name, value in originals.items()}
        try:
            operation(**{name: inside(copy) for name, copy in copies.items()})
        finally:  # if the operation refuses, the caller checks that it has written nothing
            for argument in schema:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                name = argument.name
                copy_back(originals.get(name), copies.get(name), name, is_written=is_written)

    return run
