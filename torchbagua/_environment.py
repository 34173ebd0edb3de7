"""The machine and the software versions that the measurements of a run depend on."""

import os
import platform

import torch

from torchbagua.version import __version__


def environment() -> dict[str, str | int]:
    """Return both by name, without host names and paths, since results are published."""
    return {
        "torchbagua": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": os.cpu_count() or 1,
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use; a container or taskset can limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
