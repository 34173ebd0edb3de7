"""Other people's frameworks: what an adapter says where its own is missing, or older than what was tested."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from torch.torch_version import TorchVersion

from torchbagua.user_warning import warn_user


@contextmanager
def framework(package: str, *, tested: str, adapter: str, extra: str | None = None) -> Iterator[None]:
    """Import a framework in the `with` block. Afterwards a RuntimeWarning is given if it is older than what was tested.

    For the top of an adapter:

        with framework("accelerate", tested="1.15.0", adapter="torchbagua.accelerate"):
            import accelerate

    Args:
        package: its name, as pip knows it.
        tested: the oldest version that the adapter's tests were run with.
        adapter: the module that needs it.
        extra: the extra of torchbagua that brings it; by default it is called as the package.

    Raises:
        ImportError: it cannot be imported; names the extra.
    """
    try:
        yield
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
