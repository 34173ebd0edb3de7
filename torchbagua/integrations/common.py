"""What adapters share: how a framework is imported, and what is checked before there is a model."""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch.torch_version import TorchVersion

from torchbagua import Algorithm, attach
from torchbagua._warnings import warn_user
from torchbagua.algorithms import get
from torchbagua.training.attach_checks import check_algorithm


@dataclass(frozen=True)
class Framework:
    """What `framework` has imported, and for whom."""

    package: str
    tested: str
    adapter: str

    def check_names(self, owner: object, names: Collection[str]) -> None:
        """Raise RuntimeError where `owner` lacks an attribute: in the version that is installed it has another name."""
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise RuntimeError(
                f"{self.adapter} needs {type(owner).__name__}.{missing[0]}, which {self.package} "
                f"{metadata.version(self.package)} does not have; it was tested with {self.package} {self.tested}: "
                f"pip install '{self.package}>={self.tested}'"
            )


@contextmanager
def framework(package: str, *, tested: str, adapter: str, extra: str | None = None) -> Iterator[Framework]:
    """Import a framework in the `with` block. Afterwards a RuntimeWarning is given if it is older than what was tested.

    For the top of an adapter:

        with framework("accelerate", tested="1.15.0", adapter="torchbagua.integrations.accelerate") as known:
            import accelerate

    What it gives has a check for private names.

    Args:
        package: its name, as pip knows it.
        tested: the oldest version that the adapter's tests were run with.
        adapter: the module that needs it.
        extra: the extra of torchbagua that brings it; by default it is called as the package.

    Raises:
        ImportError: it cannot be imported; names the extra.
    """
    try:
        yield Framework(package, tested, adapter)
    except ImportError as error:
        raise ImportError(
            f"{adapter} needs {package}, which cannot be imported ({error}); "
            f"pip install 'torchbagua[{extra or package}]'"
        ) from error
    installed = metadata.version(package)
    if TorchVersion(installed) < tested:
        warn_user(
            f"torchbagua: {adapter} was tested with {package} {tested} and later, installed is {package} {installed}"
        )


def take_arguments(
    adapter: str, algorithm: Algorithm | str, arguments: dict[str, Any], others: Collection[str]
) -> dict[str, Any]:
    """Move the arguments of an algorithm that is given by its name out of `arguments`, and return them.

    Args:
        adapter: what was called with them, for errors.
        algorithm: a registered name; or an algorithm, which takes no further ones.
        arguments: those of the call; what remains is for the framework.
        others: the names that the framework takes.

    Raises:
        KeyError: no algorithm has that name.
        TypeError: it is neither a name nor an algorithm, or an argument is neither the algorithm's nor the framework's.
        ValueError: a value does not fit. Those of an algorithm that needs the optimizer are not looked at here.
    """
    check_algorithm(adapter, algorithm)
    named = {} if isinstance(algorithm, Algorithm) else inspect.signature(get(algorithm)).parameters
    needed = {name for name, parameter in named.items() if parameter.default is parameter.empty}
    own = {name: arguments.pop(name) for name in named.keys() - needed if name in arguments}
    if unknown := sorted(arguments.keys() - set(others)):
        raise TypeError(
            f"{adapter}: {unknown[0]} is no argument of {algorithm!r}, which has {sorted(named.keys() - needed)}, nor "
            f"one that is handed on: {sorted(others)}"
        )
    if isinstance(algorithm, str) and not needed:
        Algorithm.init(algorithm, **own)
    return own


def check_options(options: Collection[str]) -> None:
    """Raise TypeError unless all are keyword arguments of `torchbagua.attach`, for one that is called later."""
    parameters = inspect.signature(attach).parameters.values()
    allowed = sorted(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
    if unknown := sorted(set(options) - set(allowed)):
        raise TypeError(f"attach: {unknown[0]} is no option of torchbagua.attach, which has {allowed}")


def check_uses_ddp(accelerator: Any) -> None:
    """Raise ValueError where accelerate makes no DistributedDataParallel: of one process, or FSDP's."""
    if not str(accelerator.distributed_type.value).startswith("MULTI_"):
        raise ValueError(
            "attach: accelerate must run DistributedDataParallel, of several processes, got DistributedType."
            f"{accelerator.distributed_type.value}; start with torchrun or accelerate launch, without FSDP or DeepSpeed"
        )


def without_compiler(model: torch.nn.Module) -> Any:
    """Return the module that torch.compile has wrapped, or `model`."""
    return getattr(model, "_orig_mod", model)
