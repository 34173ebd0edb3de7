"""The wheels that pip builds from the sources: a pure wheel or a wheel with the library, without downloading torch.

pip fetches setuptools for the isolated build.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import programs
from source_tree import compiler_that, copy_sources, fork_python
from torchbagua.native import recipe

# The call with which pip builds, without pip's three processes around it.
BUILD_WHEEL = "import setuptools.build_meta as backend; backend.build_wheel('wheels')"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, and the working folder of the test."""
    monkeypatch.chdir(copy_sources(tmp_path / "checkout"))
    Path("wheels").mkdir()
    return Path.cwd()


def relative_files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.release
def test_isolated_install_is_pure_complete_and_fetches_no_torch(checkout: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    programs.run([sys.executable, "-m", "venv", "--without-pip", environment])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "bin" / "python"]

    log = programs.run([*pip, "install", "-v", "--no-deps", "."], stderr=subprocess.STDOUT).stdout

    assert "torchbagua: pure wheel, the native library will be compiled at first use" in log
    fetched = [line for line in log.splitlines() if "Collecting" in line or "Downloading" in line]
    assert not [line for line in fetched if "torch" in line]
    (packages,) = environment.glob("lib/python*/site-packages")
    assert {path.name.split("-")[0] for path in packages.iterdir()} == {"torchbagua"}
    assert not list(packages.rglob("*.so"))
    assert "Tag: py3-none-any" in next(packages.glob("*.dist-info/WHEEL")).read_text()
    # The first use finds all sources of the checkout there.
    installed = packages / "torchbagua" / "_csrc"
    for binary in (recipe.CPU, recipe.CUDA, recipe.NVRTC):
        assert recipe.stem(binary, installed) == recipe.stem(binary, checkout / "csrc_cuda")
    assert relative_files(installed) == relative_files(checkout / "csrc_cuda")
    assert Path("kernels/qadam.cuh") in relative_files(installed)
    code = "from torchbagua.native import loader; print(loader.sources())"
    assert fork_python(code, packages) == (0, f"{installed}\n", "")


@pytest.mark.release
def test_wheel_built_alongside_torch_contains_the_library(checkout: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    programs.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", "."])

    (path,) = Path("wheels").glob("*.whl")
    assert "-cp310-abi3-" in path.name
    with zipfile.ZipFile(path) as wheel:
        library = f"torchbagua/native/{recipe.stem(recipe.CPU, checkout / 'csrc_cuda')}.abi3.so"
        assert [name for name in wheel.namelist() if name.endswith(".so")] == [library]
        wheel.extractall(tmp_path / "installed")
    code = "from torchbagua import native; native.load(); print({(row.path, row.why) for row in native.status()})"
    expected = (0, "{('aot', 'built ahead of time')}\n", "")
    assert fork_python(code, tmp_path / "installed", TORCHBAGUA_NATIVE="aot") == expected


def test_without_compiler_the_wheel_is_pure_and_with_one_that_fails_there_is_none(
    checkout: Path, tmp_path: Path
) -> None:
    compiler = compiler_that(tmp_path / "broken-c++", "echo no room for jokes >&2; exit 1")
    status, out, err = fork_python(BUILD_WHEEL, checkout, CXX=str(compiler))
    assert status != 0
    assert "no room for jokes" in out + err
    assert not list(Path("wheels").iterdir())
    status, out, err = fork_python(BUILD_WHEEL, checkout, CXX="absent-c++")
    assert status == 0, err
    assert "torchbagua: pure wheel" in out
    assert "absent-c++, set by CXX, is not on PATH" in out
    (path,) = Path("wheels").glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith(".so")]


def test_source_distribution_contains_the_cpp_sources(checkout: Path, tmp_path: Path) -> None:
    build = "import setuptools.build_meta as backend; print(backend.build_sdist('wheels'))"
    status, out, err = fork_python(build, checkout, CXX="absent-c++")
    assert status == 0, err
    with tarfile.open(Path("wheels") / out.splitlines()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("torchbagua-*")
    for binary in (recipe.CPU, recipe.CUDA, recipe.NVRTC):
        stems = {recipe.stem(binary, folder / "csrc_cuda") for folder in (unpacked, checkout)}
        assert len(stems) == 1
    assert relative_files(unpacked / "csrc_cuda") == relative_files(checkout / "csrc_cuda")
