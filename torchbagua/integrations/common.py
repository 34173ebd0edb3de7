"""Code that adapters share: the import of a framework, and checks that need no model."""

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
from torchbagua.training.checks import check_algorithm


@dataclass(frozen=True)
class Framework:
    """The framework that `framework` has imported, and the adapter that needs it."""

    package: str
    tested: str
    adapter: str

    def check_names(self, owner: object, names: Collection[str]) -> None:
        """Raise RuntimeError if `owner` lacks an attribute, which may have another name in the installed version."""
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise RuntimeError(
                f"{self.adapter} needs {type(owner).__name__}.{missing[0]}, which {self.package} "
                f"{metadata.version(self.package)} does not have; it was tested with {self.package} {self.tested}: "
                f"pip install '{self.package}>={self.tested}'"
            )


@contextmanager
def framework(package: str, *, tested: str, adapter: str, extra: str | None = None) -> Iterator[Framework]:
    """Import a framework in the `with` block. Gives a RuntimeWarning if its version is older than the tested one.

    For the top of an adapter:

        with framework("accelerate", tested="1.15.0", adapter="torchbagua.integrations.accelerate") as known:
            import accelerate

    It yields a Framework, which has a check for private names.

    Args:
        package: the package's name on PyPI.
        tested: the oldest version that the adapter's tests were run with.
        adapter: the module that needs it.
        extra: the extra of torchbagua that installs it; by default it has the package's name.

    Raises:
        ImportError: the framework cannot be imported. The message names the extra.
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
            f"torchbagua: {adapter} was tested with {package} {tested} and later; installed is {package} {installed}"
        )


def take_arguments(
    adapter: str, algorithm: Algorithm | str, arguments: dict[str, Any], others: Collection[str]
) -> dict[str, Any]:
    """Move the arguments of an algorithm that is given by its name out of `arguments`, and return them.

    Args:
        adapter: the function that was called, for errors.
        algorithm: a registered name; or an algorithm, which takes no further arguments.
        arguments: the arguments of the call. The framework's arguments remain.
        others: the names of the framework's arguments.

    Raises:
        KeyError: no algorithm has that name.
        TypeError: `algorithm` is neither a name nor an algorithm, or an argument is neither the algorithm's nor the
            framework's.
        ValueError: a value is invalid. Values for an algorithm that needs the optimizer are not checked here.
    """
    check_algorithm(adapter, algorithm)
    named = {} if isinstance(algorithm, Algorithm) else inspect.signature(get(algorithm)).parameters
    needed = {name for name, parameter in named.items() if parameter.default is parameter.empty}
    own = {name: arguments.pop(name) for name in named.keys() - needed if name in arguments}
    if unknown := sorted(arguments.keys() - set(others)):
        raise TypeError(
            f"{adapter}: {unknown[0]} is not an argument of {algorithm!r}, which has {sorted(named.keys() - needed)}, "
            f"nor one that is passed to the framework: {sorted(others)}"
        )
    if isinstance(algorithm, str) and not needed:
        Algorithm.init(algorithm, **own)
    return own


def check_options(options: Collection[str]) -> None:
    """Raise TypeError unless all options are keyword arguments of `torchbagua.attach`, if it is only called later."""
    parameters = inspect.signature(attach).parameters.values()
    allowed = sorted(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    if unknown := sorted(set(options) - set(allowed)):
        raise TypeError(f"attach: {unknown[0]} is not an option of torchbagua.attach, which has {allowed}")


def check_uses_ddp(accelerator: Any) -> None:
    """Raise ValueError if accelerate creates no DistributedDataParallel: in a single process, or with FSDP."""
    if not str(accelerator.distributed_type.value).startswith("MULTI_"):
        raise ValueError(
            "attach: accelerate must run DistributedDataParallel in several processes, got DistributedType."
            f"{accelerator.distributed_type.value}; start with torchrun or accelerate launch, without FSDP or DeepSpeed"
        )


def without_compiler(model: torch.nn.Module) -> Any:
    """Return the module that torch.compile has wrapped, or `model` if it is not compiled."""
    return getattr(model, "_orig_mod", model)
