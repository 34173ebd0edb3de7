"""Compiles the CUDA kernels with NVRTC, the compiler in torch's own CUDA wheels. Compiling needs no GPU.

The result is stored in the cache of build.py, one file per sources, options, architecture and NVRTC version.
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

# The oldest compute capability with kernels: 7.5, the oldest that CUDA 13 supports.
OLDEST_ARCHITECTURE = recipe.ARCHITECTURES[0]

INSTALL = "`pip install 'torchbagua[cuda]'` installs cuda-python"


class Compiler:
    """NVRTC, and the sources that it compiles."""

    def __init__(self, bindings: ModuleType, csrc: Path, binary: recipe.Binary = recipe.NVRTC) -> None:
        self._bindings = bindings
        self._csrc = csrc
        self._binary = binary
        self.version = ".".join(map(str, self._call("nvrtcVersion")))  # such as "13.0"
        (self._architectures,) = self._call("nvrtcGetSupportedArchs")

    def target_of(self, capability: int) -> str:
        """Returns the target to compile for on a GPU of the compute capability, 90 for 9.0: machine code, else PTX."""
        if capability < OLDEST_ARCHITECTURE:
            raise RuntimeError(
                f"the GPU has compute capability {_dotted(capability)}, but the kernels need "
                f"{_dotted(OLDEST_ARCHITECTURE)} or newer; set TORCHBAGUA_NATIVE=reference to run without them"
            )
        nearest = nearest_architecture(capability, self._architectures)
        # Machine code runs on later minor versions of its major version; PTX runs on all later versions.
        return f"sm_{nearest}" if nearest // 10 == capability // 10 else f"compute_{nearest}"

    def has_source(self, path: str) -> bool:
        """Returns whether the sources contain the file `path`."""
        return (self._csrc / path).is_file()

    def image_for(self, capability: int) -> bytes:
        """Returns the kernels for a GPU of the compute capability, from the cache if it has them."""
        target = self.target_of(capability)
        file = self.cache_file(target)
        image = read_sealed(file)
        if image is None:
            image = self.compile(target)
            _store(file, image)
        return image

    def cache_file(self, target: str) -> Path:
        """Returns the cache file of the kernels for `target`, whether it exists or not."""
        stem = recipe.stem(self._binary, self._csrc)
        return cache_folder() / f"{stem}-{target}-nvrtc_{self.version}.cuda"

    def compile(self, target: str) -> bytes:
        """Returns machine code for a target such as "sm_90", or PTX for a target such as "compute_90"."""
        source = f'#include "{self._binary.sources}"\n'.encode()
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

    def _text(self, kind: str, program: object) -> bytes:
        """Returns a log or an image of a program: `kind` is the name in NVRTC's getters."""
        (size,) = self._call(f"nvrtcGet{kind}Size", program)
        text = bytes(size)  # cuda.bindings writes into bytes, although Python considers them immutable
        self._call(f"nvrtcGet{kind}", program, text)
        return text

    def _call(self, function: str, *arguments: object) -> tuple[Any, ...]:
        """Calls an NVRTC function and returns its results; RuntimeError if it fails."""
        result, *results = getattr(self._bindings, function)(*arguments)
        if result != self._bindings.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function} of NVRTC failed: {result.name}")
        return tuple(results)


def find_compiler(torch_cuda: str | None, csrc: Path) -> Compiler:
    """Returns the NVRTC for a torch with CUDA `torch_cuda` (`torch.version.cuda`); raises Unavailable."""
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
            f"cuda-python finds no NVRTC ({cause}): run `pip install 'nvidia-cuda-nvrtc=={major}.*'`, and install a "
            f"cuda-python for torch's CUDA, {major}"
        ) from None


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _store(file: Path, image: bytes) -> None:
    """Stores `image` for the next start, or warns that it cannot; other processes see the complete file or none."""
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
            f"torchbagua recompiles its CUDA kernels at every start, because it cannot cache them: {error}; "
            "set TORCHBAGUA_CACHE to another cache folder"
        )
