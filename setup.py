"""Builds torchbagua: ahead of time if torch and a C++ compiler are available, else as a pure wheel.

pyproject.toml contains all other settings. torch is not a build requirement, because pip would download it to build.
An isolated build (the default) therefore never sees torch, and builds a pure wheel, which ships `csrc_cuda` and
compiles at first use. `--no-build-isolation` builds a wheel with the CPU library and, with a CUDA build of torch and
its nvcc, the CUDA library. If a compiler exists but fails, the build fails.
"""

import os
import re
import runpy
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import setuptools
from setuptools import find_packages, setup

# pyproject.toml requires it too, but without isolation pip does not check it, and an older setuptools fails with an
# obscure error.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"torchbagua needs setuptools 77 or newer to build, found {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "torchbagua" / "native"
RECIPE = runpy.run_path(str(NATIVE / "recipe.py"))
TOOLKIT = runpy.run_path(str(NATIVE / "cuda_toolkit.py"))


def configure_build() -> dict[str, Any]:
    """Returns the arguments of `setup` that build the libraries; if this is impossible, prints why and returns none."""
    # torch compiles with $CXX, or c++; setuptools links with another compiler unless CXX is set.
    compiler = os.environ.setdefault("CXX", "c++")
    try:
        import torch
    except ImportError as error:
        return use_pure_wheel(f"torch cannot be imported ({error}); use --no-build-isolation, with torch installed")
    if shutil.which(shlex.split(compiler)[0]) is None:
        return use_pure_wheel(f"no C++ compiler was found ({compiler}, set by CXX, is not on PATH)")
    try:
        toolkit = TOOLKIT["usable_toolkit"](torch.version.cuda)
    except TOOLKIT["Unavailable"] as reason:
        print(f"torchbagua: no CUDA library is built, its kernels will be compiled at first use: {reason}")
        libraries = [library(RECIPE["CPU"])]
    else:
        # torch.utils.cpp_extension reads CUDA_HOME at import.
        os.environ["CUDA_HOME"] = str(toolkit.folder)
        libraries = [library(RECIPE["CPU"]), library(RECIPE["CUDA"], toolkit)]

    from torch.utils.cpp_extension import BuildExtension

    class BuildLibrary(BuildExtension):
        """torch's build_ext, which in an editable install first removes the libraries of earlier sources."""

        def run(self) -> None:
            if self.inplace:
                for binary in (RECIPE["CPU"], RECIPE["CUDA"]):
                    for stale in NATIVE.glob(f"{binary.prefix}*.so"):
                        stale.unlink()
            super().run()

    return {"ext_modules": libraries, "cmdclass": {"build_ext": BuildLibrary}}


def readme() -> str:
    """Returns README.md with absolute links, since the package index has no other files."""
    found = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'(!\[[^]]*\]\(|src="|srcset=")(?!http)', rf"\g<1>{found[1]}/raw/main/", text)
    return re.sub(r"(\]\()(?!http|#)", rf"\g<1>{found[1]}/blob/main/", text)


def library(binary: Any, toolkit: Any = None) -> setuptools.Extension:
    """Returns the extension that builds `binary`; CUDA needs a toolkit."""
    # Not CUDAExtension: it links the CUDA runtime as a shared library, which ties the build to one CUDA version.
    from torch.utils.cpp_extension import CppExtension

    nvcc_flags, folders, libraries = list(binary.nvcc_flags), [], []
    if toolkit is not None:
        architectures = [name for name in RECIPE["ARCHITECTURES"] if name in toolkit.architectures]
        nvcc_flags += [*RECIPE["gencode_flags"](architectures), "--threads=0"]  # compiles them in parallel
        folders, libraries = list(map(str, toolkit.library_folders())), ["torch_cuda"]
    return CppExtension(
        name="torchbagua.native." + RECIPE["stem"](binary, ROOT / "csrc_cuda"),
        # setuptools requires paths relative to this file.
        sources=[str(path.relative_to(ROOT)) for path in RECIPE["source_files"](binary, ROOT / "csrc_cuda")],
        include_dirs=[str(ROOT / "csrc_cuda")],
        library_dirs=folders,
        libraries=libraries,
        extra_compile_args={"cxx": list(binary.cxx_flags), "nvcc": nvcc_flags},
        extra_link_args=list(binary.ldflags),
        py_limited_api=True,
    )


def use_pure_wheel(reason: str) -> dict[str, Any]:
    """Prints to pip's log (`pip -v` shows it) that the library will be compiled at first use."""
    print(f"torchbagua: pure wheel, the native library will be compiled at first use: {reason}")
    return {}


ahead = configure_build()
# setuptools packs everything in its build folder. A persistent folder would contain files deleted from the sources.
with tempfile.TemporaryDirectory() as build_folder:
    setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        packages=[*find_packages(include=["torchbagua", "torchbagua.*"]), "torchbagua._csrc"],
        # Every wheel contains the C++ sources, as the data of a package without Python code.
        package_dir={"torchbagua._csrc": "csrc_cuda"},
        package_data={"torchbagua": ["py.typed"], "torchbagua._csrc": ["**/*"]},
        include_package_data=False,
        options={
            "build": {"build_base": build_folder},
            "bdist_wheel": {"py_limited_api": RECIPE["PYTHON_TAG"]} if ahead else {},
        },
        **ahead,
    )
