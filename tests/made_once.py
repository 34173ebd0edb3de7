"""Files that several tests need and that take long to create, such as a compiler's output: created once for all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a folder of this run of pytest. The first test that asks for it creates it.

    Args:
        tmp_path_factory: pytest's.
        name: the name of the folder, the same in all workers of xdist.
        make: writes the files into an empty folder, which is then moved to its place.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with FileLock(base / f"{name}.lock"):
        if not (base / name).exists():
            making = tmp_path_factory.mktemp(name)
            make(making)
            making.rename(base / name)
    return base / name
