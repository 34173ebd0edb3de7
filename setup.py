"""Builds torchbagua: ahead of time where torch and a C++ compiler are at hand, else as a pure wheel.

Everything else stands in pyproject.toml. torch is no build requirement, because pip would download it to build: so an
isolated build (the default) never sees it and gives a pure wheel, which ships `csrc_cuda` and compiles at first use;
`--no-build-isolation` gives a wheel with the library for the CPU and, where a torch with CUDA and its nvcc are, the one
for CUDA. A compiler that is there and fails, fails the build.
"""

import os
import runpy
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import setuptools
from setuptools import find_packages, setup

# pyproject.toml asks for it too, but without isolation pip does not look, and an older one fails with a riddle.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"torchbagua needs setuptools 77 or newer to be built, here is {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "torchbagua" / "native"
RECIPE = runpy.run_path(str(NATIVE / "recipe.py"))
TOOLKIT = runpy.run_path(str(NATIVE / "cuda_toolkit.py"))


def built_ahead() -> dict[str, Any]:
    """The arguments of `setup` that build the libraries; none, with a line that says why, where that cannot be."""
    # torch compiles with $CXX, or c++; setuptools links with another compiler unless CXX is set.
    compiler = os.environ.setdefault("CXX", "c++")
    try:
        import torch
    except ImportError as error:
        return pure(f"torch cannot be imported here ({error}); use --no-build-isolation, with torch installed")
    if shutil.which(shlex.split(compiler)[0]) is None:
        return pure(f"there is no C++ compiler ({compiler}, set by CXX, is not on PATH)")
    try:
        toolkit = TOOLKIT["usable_toolkit"](torch.version.cuda)
    except TOOLKIT["Unavailable"] as why:
        print(f"torchbagua: no library for CUDA is built, its kernels will be compiled at first use: {why}")
        libraries = [library(RECIPE["CPU"])]
    else:
        # torch.utils.cpp_extension reads it when it is imported.
        os.environ["CUDA_HOME"] = str(toolkit.folder)
        libraries = [library(RECIPE["CPU"]), library(RECIPE["CUDA"], toolkit)]

    from torch.utils.cpp_extension import BuildExtension

    class BuildLibrary(BuildExtension):
        """torch's build_ext, which for an editable install first removes the libraries of earlier sources."""

        def run(self) -> None:
            if self.inplace:
                for binary in (RECIPE["CPU"], RECIPE["CUDA"]):
                    for stale in NATIVE.glob(f"{binary.prefix}*.so"):
                        stale.unlink()
            super().run()

    return {"ext_modules": libraries, "cmdclass": {"build_ext": BuildLibrary}}


def library(binary: Any, toolkit: Any = None) -> setuptools.Extension:
    """What builds `binary`, which for CUDA needs a toolkit."""
    # Not CUDAExtension: it links the CUDA runtime as a shared library, which ties the build to one CUDA version.
    from torch.utils.cpp_extension import CppExtension

    nvcc_flags, folders, libraries = list(binary.nvcc_flags), [], []
    if toolkit is not None:
        nvcc_flags += RECIPE["gencode_flags"]([one for one in RECIPE["ARCHITECTURES"] if one in toolkit.architectures])
        folders, libraries = list(map(str, toolkit.library_folders())), ["torch_cuda"]
    return CppExtension(
        name="torchbagua.native." + RECIPE["stem"](binary, ROOT / "csrc_cuda"),
        sources=[f"csrc_cuda/{binary.source}"],
        include_dirs=[str(ROOT / "csrc_cuda")],
        library_dirs=folders,
        libraries=libraries,
        extra_compile_args={"cxx": list(binary.cxx_flags), "nvcc": nvcc_flags},
        extra_link_args=list(binary.ldflags),
        py_limited_api=True,
    )


def pure(why: str) -> dict[str, Any]:
    """Says on pip's log (`pip -v` shows it) that the library is left to the first use."""
    print(f"torchbagua: pure wheel, the native library will be compiled at first use: {why}")
    return {}


ahead = built_ahead()
# setuptools packs all that lies in its build folder: in one that is kept, files that are long gone from the sources.
with tempfile.TemporaryDirectory() as build_folder:
    setup(
        packages=[*find_packages(include=["torchbagua", "torchbagua.*"]), "torchbagua._csrc"],
        # The C++ sources travel in every wheel, as the data of a package that holds no Python.
        package_dir={"torchbagua._csrc": "csrc_cuda"},
        package_data={"torchbagua": ["py.typed"], "torchbagua._csrc": ["**/*"]},
        include_package_data=False,
        options={
            "build": {"build_base": build_folder},
            "bdist_wheel": {"py_limited_api": RECIPE["PYTHON_TAG"]} if ahead else {},
        },
        **ahead,
    )
