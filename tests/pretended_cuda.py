"""Separate processes in which torch reports a GPU that does not exist: for tests of everything before a launch."""

import os
from pathlib import Path

import programs
from source_tree import COMPILER

# Python runs a file of this name when it starts.
_SITECUSTOMIZE = """
import torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "a pretended GPU"
"""

# Stubs of torch's CUDA libraries with the function that the bindings call, which fails.
_LIBRARIES = {
    "torch_cuda": 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }',
    "c10_cuda": "",
}


def pretend_cuda(folder: Path, sources: Path) -> dict[str, str]:
    """Return the environment of a Python whose torch reports a GPU, and which imports torchbagua from `sources`.

    Args:
        folder: a new folder for the files that this needs.
        sources: the folder that contains the package.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    for name, source in _LIBRARIES.items():
        (folder / f"{name}.cpp").write_text(f"{source}\n")
        command = [*COMPILER, "-shared", "-fPIC", f"{name}.cpp", "-o", f"lib{name}.so", f"-Wl,-soname,lib{name}.so"]
        programs.run(command, cwd=folder)
    # Search paths of Python, the linker and the loader.
    return {
        "PYTHONPATH": os.pathsep.join((str(sources), str(folder))),
        "LIBRARY_PATH": str(folder),
        "LD_LIBRARY_PATH": str(folder),
    }
