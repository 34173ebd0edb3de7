"""Says which kernels every native operation runs, and why."""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchbagua.native import loader


@dataclass(frozen=True)
class OperationStatus:
    """What runs when `torchbagua::<operation>` is called on a tensor of `device`.

    Attributes:
        operation: the operation's name, without its namespace.
        device: "cpu" or "cuda".
        path: "aot" (library built ahead of time), "jit" (compiled at first use) or "reference" (plain torch).
        instruction_set: "avx512", "avx2" or "default" (portable) for native CPU kernels, else None.
        library: the loaded file, None for the reference.
        why: the reason, for people.
    """

    operation: str
    device: str
    path: loader.NativePath
    instruction_set: str | None
    library: Path | None
    why: str


def status() -> list[OperationStatus]:
    """The present state of every operation on every device of this machine; loads and changes nothing.

    Raises:
        ValueError: TORCHBAGUA_NATIVE has a value that is not allowed.
        RuntimeError: TORCHBAGUA_NATIVE asks for a path that this machine does not have.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [_status_of(operation, device) for device in devices for operation in _operations()]


def _operations() -> list[str]:
    """Every operation that schema.py has registered and that takes tensors, without its namespace."""
    registered = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    names = sorted(name for namespace, name in registered if namespace == "torchbagua")
    return [name for name in names if getattr(torch.ops.torchbagua, name).default._schema.arguments]


def _status_of(operation: str, device: str) -> OperationStatus:
    library = loader.loaded_library()
    native = torch._C._dispatch_has_kernel_for_dispatch_key(f"torchbagua::{operation}", device.upper())
    if native and library is not None:
        why = "built ahead of time" if loader.path_of(library) == "aot" else "compiled at first use"
        instruction_set = torch.ops.torchbagua.cpu_instruction_set() if device == "cpu" else None
        return OperationStatus(operation, device, loader.path_of(library), instruction_set, library, why)
    return OperationStatus(operation, device, "reference", None, None, _why_reference(device, library))


def _why_reference(device: str, library: Path | None) -> str:
    if device != "cpu":
        return "there are no native kernels for this device"
    if library is not None:
        return f"{library} has no kernel for it"
    choice = loader.choose()
    if choice.path == "reference":
        return choice.why
    return f"nothing is loaded yet; torchbagua.native.load() will take {choice.path}: {choice.why}"
