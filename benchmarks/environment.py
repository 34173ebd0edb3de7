"""What a benchmark's result depends on, recorded beside it."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _git_revision() -> str:
    """The commit, with `-dirty` where tracked files differ from it; `unknown` outside a git checkout."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return finished.stdout.strip() or "unknown"


def _first_line(*command: str, having: str = "") -> str:
    """The first line with `having` of what a program prints; `unknown` where there is none."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next((line.strip() for line in finished.stdout.splitlines() if having in line), "unknown")


def gpu_record() -> dict[str, str | float]:
    """The first GPU and what programs it; only where torch can use one."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_of_torch": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvcc": _first_line("nvcc", "--version", having="release"),
    }


def environment_record() -> dict[str, str | int]:
    """The machine, the software and the date. No host name and no path: results are published."""
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
