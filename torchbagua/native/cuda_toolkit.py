"""Finds NVIDIA's CUDA compiler, or says why it cannot be used.

`setup.py` runs this file by path, and the loader imports it: so it needs nothing beyond the standard library.
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
    """Why native kernels cannot be had in one way, in words that continue a sentence."""


class Toolkit(NamedTuple):
    """An installed CUDA toolkit.

    Attributes:
        folder: what CUDA_HOME is to name.
        version: of CUDA, such as "13.0".
        architectures: the compute capabilities that nvcc knows, 90 for 9.0.
    """

    folder: Path
    version: str
    architectures: tuple[int, ...]

    def library_folders(self) -> list[Path]:
        """Where the CUDA runtime may lie, to link with."""
        return [path for path in (self.folder / "lib64", self.folder / "lib") if path.is_dir()]


def find_nvcc() -> str | None:
    """The nvcc of $CUDA_HOME, or $CUDA_PATH, else of PATH, else of the usual place; None where there is none."""
    home = _home()
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{_USUAL_FOLDER}/bin")


def _home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def usable_toolkit(torch_cuda: str | None) -> Toolkit:
    """The toolkit for a torch with CUDA `torch_cuda` (`torch.version.cuda`); raises Unavailable."""
    if torch_cuda is None:
        raise Unavailable("this torch is built without CUDA")
    nvcc = find_nvcc()
    if nvcc is None:
        home = _home()
        searched = (
            f"on PATH, or in {_USUAL_FOLDER}" if home is None else f"in {home}, which CUDA_HOME or CUDA_PATH names"
        )
        raise Unavailable(f"there is no nvcc ({searched})")
    try:
        toolkit = _ask(nvcc)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Unavailable(f"{nvcc} does not answer as nvcc does ({error})") from None
    if toolkit.version.split(".")[0] != torch_cuda.split(".")[0]:
        raise Unavailable(f"{nvcc} is of CUDA {toolkit.version}, and torch of CUDA {torch_cuda}")
    return toolkit


def nearest_architecture(capability: int, known: Iterable[int]) -> int:
    """The newest of the `known` architectures that is no newer than `capability`; ValueError where all are newer."""
    return max(architecture for architecture in known if architecture <= capability)


def _ask(nvcc: str) -> Toolkit:
    """What `nvcc` says of itself; OSError, SubprocessError or ValueError where it is something else."""

    def answers(pattern: str, *arguments: str) -> list[str]:
        command = [nvcc, *arguments]
        asked = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = re.findall(pattern, asked.stdout)
        if not found:
            raise ValueError(f"no {pattern} in what {' '.join(arguments)} prints")
        return found

    # What is on PATH may be a script that calls the real one, beside which libraries and headers are.
    folder = answers(r"TOP=(.*)", "--dryrun", "-x", "cu", os.devnull)[0]
    version = answers(r"release (\d+\.\d+)", "--version")[0]
    architectures = sorted(map(int, answers(r"compute_(\d+)\b", "--list-gpu-arch")))
    return Toolkit(Path(folder).resolve(), version, tuple(architectures))
