"""Compiles the CUDA kernels with NVRTC, the compiler that torch's own CUDA wheels bring. It needs no GPU.

What it makes is kept in the cache of build.py, one file for sources, options, architecture and NVRTC's version.
"""

import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from torchbagua._warnings import warn_user
from torchbagua.native import recipe
from torchbagua.native.build import cache_folder, read_sealed, seal
from torchbagua.native.cuda_toolkit import Unavailable, nearest_architecture

# The oldest compute capability with kernels: 7.5, which CUDA 13 begins with.
OLDEST_ARCHITECTURE = recipe.ARCHITECTURES[0]

INSTALL = "`pip install 'torchbagua[cuda]'` brings cuda-python"


class Compiler:
    """NVRTC, and what it compiles.

    Args:
        bindings: the module `cuda.bindings.nvrtc`.
        csrc: the folder `csrc_cuda`.
        binary: what it compiles there.

    Attributes:
        version: of NVRTC, such as "13.0".

    Raises:
        RuntimeError: NVRTC's library is not found or does not load.
    """

    def __init__(self, bindings: ModuleType, csrc: Path, binary: recipe.Binary = recipe.NVRTC) -> None:
        self._bindings = bindings
        self._csrc = csrc
        self._binary = binary
        self.version = ".".join(map(str, self._call("nvrtcVersion")))
        (self._architectures,) = self._call("nvrtcGetSupportedArchs")

    def target_of(self, capability: int) -> str:
        """What to compile for a GPU of the compute capability, 90 for 9.0: machine code, else PTX for the driver.

        Raises:
            RuntimeError: the GPU is older than the kernels allow.
        """
        if capability < OLDEST_ARCHITECTURE:
            raise RuntimeError(
                f"the GPU has compute capability {_dotted(capability)}, the kernels need "
                f"{_dotted(OLDEST_ARCHITECTURE)} or newer; TORCHBAGUA_NATIVE=reference runs without them"
            )
        nearest = nearest_architecture(capability, self._architectures)
        # Machine code runs on later minor versions of its major version, PTX on everything later.
        return f"sm_{nearest}" if nearest // 10 == capability // 10 else f"compute_{nearest}"

    def has_source(self, path: str) -> bool:
        """Whether there is such a file among the sources."""
        return (self._csrc / path).is_file()

    def image_for(self, capability: int) -> bytes:
        """The kernels for a GPU of the compute capability, from the cache where they are there.

        Raises:
            RuntimeError: the GPU is older than the kernels allow, or NVRTC fails, with its output.
        """
        target = self.target_of(capability)
        file = self.cache_file(target)
        image = read_sealed(file)
        if image is None:
            image = self.compile(target)
            _keep(file, image)
        return image

    def cache_file(self, target: str) -> Path:
        """Where the kernels for `target` lie, compiled or not."""
        stem = recipe.stem(self._binary, self._csrc)
        return cache_folder() / f"{stem}-{target}-nvrtc_{self.version}.cuda"

    def compile(self, target: str) -> bytes:
        """Machine code for a target such as "sm_90", PTX for one such as "compute_90".

        Raises:
            RuntimeError: NVRTC fails, with its output.
        """
        source = f'#include "{self._binary.source}"\n'.encode()
        options = [f"--gpu-architecture={target}", *self._binary.nvcc_flags, f"--include-path={self._csrc}"]
        (program,) = self._call("nvrtcCreateProgram", source, b"torchbagua.cu", 0, None, None)
        try:
            encoded = [os.fsencode(option) for option in options]
            (result,) = self._bindings.nvrtcCompileProgram(program, len(encoded), encoded)
            if result != self._bindings.nvrtcResult.NVRTC_SUCCESS:
                log = self._text("ProgramLog", program).decode(errors="replace").strip("\0\n ")
                raise RuntimeError(f"NVRTC {self.version} failed for {target} ({result.name}):\n{log}")
            return self._text("CUBIN" if target.startswith("sm_") else "PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _text(self, what: str, program: object) -> bytes:
        """What NVRTC has of a program."""
        (size,) = self._call(f"nvrtcGet{what}Size", program)
        text = bytes(size)  # cuda.bindings wants bytes to write into, although Python takes them for constant
        self._call(f"nvrtcGet{what}", program, text)
        return text

    def _call(self, function: str, *arguments: object) -> tuple[Any, ...]:
        """The results of a function of NVRTC; RuntimeError where it fails."""
        result, *results = getattr(self._bindings, function)(*arguments)
        if result != self._bindings.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function} of NVRTC failed: {result.name}")
        return tuple(results)


def find_compiler(torch_cuda: str | None, csrc: Path) -> Compiler:
    """The NVRTC to use with a torch with CUDA `torch_cuda` (`torch.version.cuda`); raises Unavailable."""
    if torch_cuda is None:
        raise Unavailable("this torch is built without CUDA")
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise Unavailable(f"cuda-python cannot be imported ({error}): {INSTALL}") from None
    try:
        return Compiler(nvrtc, csrc)
    except RuntimeError as error:
        major = torch_cuda.split(".")[0]
        cause = str(error).splitlines()[0]
        raise Unavailable(
            f"cuda-python finds no NVRTC ({cause}): pip install 'nvidia-cuda-nvrtc=={major}.*', and a cuda-python of "
            f"torch's CUDA, {major}"
        ) from None


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _keep(file: Path, image: bytes) -> None:
    """Keeps `image` for the next start, or warns that it cannot: another process sees the whole file or none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="nvrtc-", delete=False) as temporary:
            try:
                temporary.write(image)
                temporary.flush()
                seal(Path(temporary.name))
                os.replace(temporary.name, file)
            except BaseException:
                os.unlink(temporary.name)
                raise
    except OSError as error:
        warn_user(
            f"torchbagua compiles its CUDA kernels anew at every start, because they cannot be kept: {error}; "
            "TORCHBAGUA_CACHE names another cache folder"
        )
