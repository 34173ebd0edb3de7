"""The machine and the software that a run's figures depend on."""

import os
import platform

import torch

from torchbagua.version import __version__


def environment() -> dict[str, str | int]:
    """Return them by name; no host name and no path, since results are published."""
    return {
        "torchbagua": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": os.cpu_count() or 1,
    }


def usable_cores() -> int:
    """Return how many cores this process may use, which a container or taskset can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
