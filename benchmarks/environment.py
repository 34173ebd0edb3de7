"""Records the environment of a benchmark's result, and defines where results are stored."""

import argparse
import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from torchbagua._environment import environment, usable_cores

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"


def environment_record() -> dict[str, str | int]:
    """Return the machine, the software and the date. No host name and no path: results are published."""
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_revision": git_revision(REPOSITORY),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": f"{platform.system()} {platform.release()}",
        **environment(),
    }


def git_revision(clone: Path) -> str:
    """Return the commit, with `-dirty` if tracked files differ from it."""
    return _first_line("git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def note_environment(known: list[dict[str, Any]]) -> None:
    """Append the current environment of a benchmark that continues from its file, unless it equals the last one."""
    current = environment_record()
    if not known or known[-1] | {"date_utc": ""} != current | {"date_utc": ""}:
        known.append(current)


def gpu_record() -> dict[str, str | float]:
    """Return the first GPU and its software. Call it only if torch can use a GPU."""
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


def make_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark with rounds: their number, and the file of the record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result to this file")
    return parser


def dated(name: str) -> str:
    """Return a name for a result file with the current time, without its suffix."""
    return f"{name}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}"


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Write a result to `path` as JSON, preceded by the environment. If `path` is None, write nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment_record(), **record}, indent=1) + "\n")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _first_line(*command: str, having: str = "") -> str:
    """Return the first line of a program's output that contains `having`, or `unknown` if no line does."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next((line.strip() for line in finished.stdout.splitlines() if having in line), "unknown")
