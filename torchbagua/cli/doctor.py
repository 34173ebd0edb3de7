"""`torchbagua doctor`: what torchbagua finds on this machine, and which kernels it runs and why."""

import argparse
import os
import platform
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import torchbagua
from torchbagua._text_table import table
from torchbagua.native import build, cuda_toolkit, loader, nvrtc
from torchbagua.native.cuda_toolkit import Unavailable
from torchbagua.native.loader import OperationStatus, status


def main(arguments: Sequence[str] = ()) -> int:
    """Prints the report; returns 0 if torchbagua is usable here, else 1. The last lines then give the reasons."""
    parser = argparse.ArgumentParser(prog="torchbagua doctor", description=__doc__)
    parser.parse_args(arguments)

    problems = []
    try:
        print(table([("finding", "value"), *_findings()], num_left=2))
        print()
        with warnings.catch_warnings():
            # The column `why` of the table below repeats the warning.
            warnings.simplefilter("ignore", RuntimeWarning)
            loader.load()
        print(table([("operation", "device", "path", "instructions", "why"), *map(_row, status())], num_left=5))
        print()
        for kernels in loader.usable_devices():
            print(f"{kernels.device} kernels: {_origin(kernels)}")
    except (OSError, RuntimeError, ValueError) as error:
        problems.append(f"the native kernels: {error}")
    if not (_has_gloo() or _has_nccl()):
        problems.append("torch.distributed: this torch was built with neither gloo nor NCCL")

    print()
    for problem in problems:
        print(f"NOT USABLE: {problem}")
    if not problems:
        print("torchbagua is usable here.")
    return 1 if problems else 0


def _findings() -> list[tuple[str, str]]:
    missing_backend = "not in this build of torch"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        ("torchbagua", torchbagua.__version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("platform", f"{platform.platform()}, {os.cpu_count()} CPUs"),
        ("CPU capability of torch", torch.backends.cpu.get_cpu_capability()),
        ("GPUs", ", ".join(gpus) or "none"),
        ("gloo", "available" if _has_gloo() else missing_backend),
        ("NCCL", "available" if _has_nccl() else missing_backend),
        ("C++ compiler", _found(build.find_compiler)),
        ("nvcc", _found(_toolkit)),
        ("NVRTC", _found(_run_time_compiler)),
        ("ninja", str(build.ninja_folder() or "none")),
        ("native sources", str(loader.sources())),
        ("cache", str(build.cache_folder())),
        (loader.VARIABLE, _forced()),
        ("freed memory", _freed_memory()),
    ]


def _found(find: Callable[[], str]) -> str:
    """Returns the result of `find`, or why it is unavailable."""
    try:
        return find()
    except Unavailable as reason:
        return str(reason)


def _toolkit() -> str:
    toolkit = cuda_toolkit.usable_toolkit(torch.version.cuda)
    return f"CUDA {toolkit.version} in {toolkit.folder}"


def _run_time_compiler() -> str:
    return f"CUDA {nvrtc.find_compiler(torch.version.cuda, loader.sources()).version}"


def _forced() -> str:
    forced = os.environ.get(loader.VARIABLE) or "not set: the best available"
    has_gpu = loader.CUDA in loader.usable_devices()
    return f"{forced}, which needs a GPU; none is usable" if forced == "nvrtc" and not has_gpu else forced


def _freed_memory() -> str:
    """Describes whether the C library may return memory to the system in each step, which causes page faults."""
    if platform.libc_ver()[0] != "glibc":
        return "unknown: the C library is not glibc"
    unset = [name for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_") if name not in os.environ]
    if not unset:
        return "kept, according to the thresholds in the environment"
    return f"page faults may take a sixth of a step on CPUs, see docs/guides/costs.md: {' and '.join(unset)} not set"


def _origin(kernels: loader.DeviceKernels) -> str:
    """Returns the origin of a device's kernels."""
    path = loader.loaded_path(kernels)
    if path is None:
        return "none, the reference kernels run in plain torch"
    library = loader.loaded_library(kernels)
    return f"{path}, {library}" if library else f"{path}, cached in {build.cache_folder()}"


def _has_gloo() -> bool:
    return dist.is_available() and dist.is_gloo_available()


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _row(operation: OperationStatus) -> tuple[str, ...]:
    instructions = operation.instruction_set or "-"
    return operation.operation, operation.device, operation.path, instructions, operation.why
