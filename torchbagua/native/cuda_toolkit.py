"""Finds NVIDIA's CUDA compiler, or reports why it cannot be used.

`setup.py` runs this file by path, and the loader imports it, so it needs only the standard library.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_USUAL_FOLDER = "/usr/local/cuda"


class Unavailable(Exception):
    """The reason why one path to native kernels is unavailable, phrased as a clause of a longer message."""


class Toolkit(NamedTuple):
    """An installed CUDA toolkit."""

    folder: Path  # the value for CUDA_HOME
    version: str  # such as "13.0"
    architectures: tuple[int, ...]  # the compute capabilities that nvcc supports, 90 for 9.0

    def library_folders(self) -> list[Path]:
        """Returns the folders that may contain the CUDA runtime to link with."""
        return [path for path in (self.folder / "lib64", self.folder / "lib") if path.is_dir()]


def find_nvcc() -> str | None:
    """Returns the nvcc in $CUDA_HOME or $CUDA_PATH, else on PATH, else in the usual folder; None if none is found."""
    home = _home()
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{_USUAL_FOLDER}/bin")


def _home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def usable_toolkit(torch_cuda: str | None) -> Toolkit:
    """Returns the toolkit for a torch with CUDA `torch_cuda` (`torch.version.cuda`); raises Unavailable."""
    if torch_cuda is None:
        raise Unavailable("this torch is built without CUDA")
    nvcc = find_nvcc()
    if nvcc is None:
        home = _home()
        searched = (
            f"on PATH or in {_USUAL_FOLDER}" if home is None else f"in {home}, which CUDA_HOME or CUDA_PATH specifies"
        )
        raise Unavailable(f"nvcc was not found {searched}")
    try:
        toolkit = _query(nvcc)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Unavailable(f"{nvcc} does not respond like nvcc ({error})") from None
    if toolkit.version.split(".")[0] != torch_cuda.split(".")[0]:
        raise Unavailable(f"{nvcc} is from CUDA {toolkit.version}, but torch was built with CUDA {torch_cuda}")
    return toolkit


def nearest_architecture(capability: int, known: Iterable[int]) -> int:
    """Returns the newest `known` architecture that is no newer than `capability`; ValueError if all are newer."""
    return max(architecture for architecture in known if architecture <= capability)


def _query(nvcc: str) -> Toolkit:
    """Asks `nvcc` about its toolkit; OSError, SubprocessError or ValueError if it is not an nvcc."""

    def find_in_output(pattern: str, *arguments: str) -> list[str]:
        command = [nvcc, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = re.findall(pattern, output.stdout)
        if not found:
            raise ValueError(f"no {pattern} in the output of {' '.join(arguments)}")
        return found

    # The nvcc on PATH may be a script that calls the real one, which is next to the libraries and headers.
    folder = find_in_output(r"TOP=(.*)", "--dryrun", "-x", "cu", os.devnull)[0]
    version = find_in_output(r"release (\d+\.\d+)", "--version")[0]
    architectures = sorted(map(int, find_in_output(r"compute_(\d+)\b", "--list-gpu-arch")))
    return Toolkit(Path(folder).resolve(), version, tuple(architectures))
