"""`torchbagua doctor`: what torchbagua finds on this machine, and which kernels it runs and why."""

import argparse
import os
import platform
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

import torchbagua
from torchbagua.cli.table import table
from torchbagua.native import OperationStatus, cuda_toolkit, devices, first_use, loader, nvrtc, status


def main(arguments: Sequence[str] = ()) -> int:
    """Prints the report; 0 where torchbagua can be used here, 1 where not, which the last line then explains."""
    parser = argparse.ArgumentParser(prog="torchbagua doctor", description=__doc__)
    parser.parse_args(arguments)

    problems = []
    try:
        print(table([("finding", "value"), *_findings()], num_left=2))
        print()
        with warnings.catch_warnings():
            # The table below says what the warning would, in the column `why`.
            warnings.simplefilter("ignore", RuntimeWarning)
            loader.load()
        print(table([("operation", "device", "path", "instructions", "why"), *map(_row, status())], num_left=5))
        print()
        for kernels in devices.here():
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
    compiler = first_use.find_compiler()
    missing_backend = "not in this build of torch"
    missing_compiler = f"none ({first_use.compiler_command()[0]} is not on PATH; CXX names another)"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    toolkit = cuda_toolkit.usable_toolkit(torch.version.cuda)
    run_time_compiler = nvrtc.find_compiler(torch.version.cuda, loader.sources())
    return [
        ("torchbagua", torchbagua.__version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("platform", f"{platform.platform()}, {os.cpu_count()} CPUs"),
        ("CPU capability of torch", torch.backends.cpu.get_cpu_capability()),
        ("GPUs", ", ".join(gpus) or "none"),
        ("gloo", "available" if _has_gloo() else missing_backend),
        ("NCCL", "available" if _has_nccl() else missing_backend),
        ("C++ compiler", compiler or missing_compiler),
        ("nvcc", toolkit if isinstance(toolkit, str) else f"CUDA {toolkit.version} in {toolkit.folder}"),
        ("NVRTC", run_time_compiler if isinstance(run_time_compiler, str) else f"CUDA {run_time_compiler.version}"),
        ("ninja", str(first_use.ninja_folder() or "none")),
        ("native sources", str(loader.sources())),
        ("cache", str(first_use.cache_folder())),
        (loader.VARIABLE, _forced()),
    ]


def _forced() -> str:
    forced = os.environ.get(loader.VARIABLE) or "not set: the best there is"
    has_gpu = devices.CUDA in devices.here()
    return f"{forced}, which is for GPUs, and there is none" if forced == "nvrtc" and not has_gpu else forced


def _origin(kernels: devices.DeviceKernels) -> str:
    """Where the kernels of a device come from."""
    path = loader.loaded_path(kernels)
    if path is None:
        return "none, the reference runs in plain torch"
    library = loader.loaded_library(kernels)
    return f"{path}, {library}" if library else f"{path}, kept in {first_use.cache_folder()}"


def _has_gloo() -> bool:
    return dist.is_available() and dist.is_gloo_available()


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _row(operation: OperationStatus) -> tuple[str, ...]:
    instructions = operation.instruction_set or "-"
    return operation.operation, operation.device, operation.path, instructions, operation.why
