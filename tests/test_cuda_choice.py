"""How torchbagua chooses the source of its CUDA kernels, and its errors if it has none; torch's GPU is imitated."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from pretended_cuda import pretend_cuda
from source_tree import REPOSITORY, build_empty_library, copy_sources, replace_cpu_sources, run_python
from torchbagua.native import cuda_toolkit, launcher, loader, nvrtc, recipe
from torchbagua.native.ops import NATIVE_OPS

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings, of the extra dev, is not installed"
)
TOOLKIT = cuda_toolkit.Toolkit(Path("/nowhere"), "13.0", (75, 80, 90, 120))

LOAD = """
from torchbagua import native
native.load()
print(native.loader.loaded_path(native.loader.CUDA))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imitate an empty package folder, on a machine with four GPUs, without nvcc and NVRTC."""
    native = tmp_path / "torchbagua" / "native"
    native.mkdir(parents=True)
    replace_cpu_sources(tmp_path / "csrc_cuda")
    for binary in (recipe.CUDA, recipe.NVRTC):
        source = tmp_path / "csrc_cuda" / binary.sources
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("// nothing\n")
    monkeypatch.setattr(loader, "__file__", str(native / "loader.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "capabilities", lambda: [90, 80, 70, 121])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.delenv("TORCHBAGUA_NATIVE", raising=False)
    return native


NO_LIBRARY = "no library for cuda was built ahead of time"


@pytest.mark.parametrize(
    ("available", "forced", "path", "why"),
    [
        ("library nvcc", None, "aot", ""),
        ("nvcc", None, "jit", f"{NO_LIBRARY}; compiled at first use by .* and nvcc 13.0$"),
        pytest.param("nvrtc", None, "nvrtc", f"{NO_LIBRARY}, and nvcc was not found", marks=needs_nvrtc),
        ("", None, "reference", f"{NO_LIBRARY}.*nvcc was not found.*cuda-python cannot be imported"),
        pytest.param("library nvcc nvrtc", "nvrtc", "nvrtc", "", marks=needs_nvrtc),
        ("library nvcc", "reference", "reference", "^TORCHBAGUA_NATIVE=reference$"),
        ("", "aot", "", f"TORCHBAGUA_NATIVE=aot, but {NO_LIBRARY}"),
        ("", "jit", "", "TORCHBAGUA_NATIVE=jit, but nvcc was not found"),
        ("", "nvrtc", "", r"TORCHBAGUA_NATIVE=nvrtc, but cuda-python cannot be imported .*torchbagua\[cuda\]"),
    ],
)
def test_choice(
    package: Path, monkeypatch: pytest.MonkeyPatch, available: str, forced: str | None, path: str, why: str
) -> None:
    """The first that is available of a built library, nvcc and NVRTC. A forced path that is unavailable raises."""
    built = package / f"{recipe.stem(recipe.CUDA, package.parents[1] / 'csrc_cuda')}.abi3.so"
    if "library" in available:
        built.touch()
    if "nvcc" in available:
        monkeypatch.setattr(cuda_toolkit, "usable_toolkit", lambda torch_cuda: TOOLKIT)
    if "nvrtc" not in available:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    if forced is not None:
        monkeypatch.setenv("TORCHBAGUA_NATIVE", forced)
    if not path:
        with pytest.raises(RuntimeError, match=why):
            loader.choose(loader.CUDA)
        return
    choice = loader.choose(loader.CUDA)
    assert (choice.path, choice.library if path == "aot" else None) == (path, built if path == "aot" else None)
    assert re.search(why, choice.why, re.DOTALL)
    assert loader.choose(loader.CPU).path == ("reference" if forced == "reference" else "jit")


def test_nvcc_compiles_for_the_gpus_of_the_machine(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for other GPUs are other files."""
    monkeypatch.setattr(cuda_toolkit, "usable_toolkit", lambda torch_cuda: TOOLKIT)
    choice = loader.choose(loader.CUDA)
    assert choice.build is not None
    assert choice.build.architectures == (75, 80, 90, 120)
    flags = choice.build.arguments()["extra_cuda_cflags"]
    assert [flag.removeprefix("-gencode=arch=compute_") for flag in flags if "code=" in flag] == [
        *("75,code=sm_75", "80,code=sm_80", "90,code=sm_90", "120,code=sm_120", "120,code=compute_120")
    ]
    assert "--fmad=false" in flags
    assert loader.choose(loader.CUDA).library == choice.library
    monkeypatch.setattr(loader, "capabilities", lambda: [90])
    assert loader.choose(loader.CUDA).library != choice.library


def test_usable_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked after CUDA was used does not use CUDA."""
    if not torch.cuda.is_available():
        assert loader.usable_devices() == [loader.CPU]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader.usable_devices() == [loader.CPU, loader.CUDA]
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert loader.usable_devices() == [loader.CPU]


class TestLoad:
    """`load` in separate processes, with an empty library of CPU kernels and without nvcc."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        return copy_sources(tmp_path / "checkout")

    @pytest.fixture
    def environment(self, checkout: Path, tmp_path: Path) -> dict[str, str]:
        build_empty_library(checkout)
        environment = pretend_cuda(tmp_path / "cuda", checkout)
        return {**environment, "CUDA_HOME": str(tmp_path), "TORCHBAGUA_CACHE": str(tmp_path / "cache")}

    @pytest.mark.release
    @needs_nvrtc
    def test_nvrtc_compiles_when_loaded(self, tmp_path: Path, environment: dict[str, str]) -> None:
        code = f"""{LOAD}
native.load()
rows = [row for row in native.status() if row.device == "cuda" and row.path != "reference"]
print(sorted(row.operation for row in rows), {{(row.path, row.library, row.why) for row in rows}})
from torchbagua.cli import doctor
doctor.main()
import os
os.environ["TORCHBAGUA_NATIVE"] = "jit"
native.load()
"""
        status, out, err = run_python(code, tmp_path, **environment)
        assert status == 1, err
        assert "TORCHBAGUA_NATIVE=jit was set after" in err
        path, kernels, *report = out.splitlines()
        assert path == "nvrtc"
        names = sorted(name for name, operation in NATIVE_OPS.items() if not operation.is_cpu_only)
        assert kernels == f"{names} {{('nvrtc', None, 'compiled by NVRTC at first use')}}"
        assert f"cuda kernels: nvrtc, cached in {tmp_path / 'cache'}" in report
        assert [line.split()[1:3] for line in report if line.startswith("minmax_uint8_encode ")][1] == ["cuda", "nvrtc"]
        stem = recipe.stem(recipe.NVRTC, tmp_path / "checkout" / "csrc_cuda")
        (cached,) = (tmp_path / "cache").glob("*.cuda")
        assert cached.name.startswith(f"{stem}-sm_90-nvrtc_")

    @needs_nvrtc
    def test_missing_nvrtc_is_one_warning_with_the_fix_and_kernels_that_do_not_compile_raise(
        self, tmp_path: Path, checkout: Path, environment: dict[str, str]
    ) -> None:
        (checkout / "csrc_cuda" / recipe.NVRTC.sources).write_text("no room for jokes\n")
        build_empty_library(checkout)
        without, again = "sys.modules['cuda.bindings'] = None", "del sys.modules['cuda.bindings']"
        code = f"import sys, warnings; {without}; warnings.simplefilter('always')\n{LOAD * 2}\n{again}\n{LOAD}"
        status, out, err = run_python(code, tmp_path, **environment)
        assert (status, out) == (1, "None\n" * 2), err
        warned, _, error = err.partition("Traceback")
        assert warned.count("RuntimeWarning") == 1
        for part in ("reference kernels for cuda", "nvcc was not found", "`pip install 'torchbagua[cuda]'`"):
            assert part in warned
        for part in ("NVRTC for cuda is not usable", "no room for jokes", "TORCHBAGUA_NATIVE=reference"):
            assert part in error


def test_an_old_gpu_raises_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registration must work, because the GPU may only drive the screen of a machine that trains on the CPU."""
    registered: list[launcher.CudaKernels] = []
    monkeypatch.setattr(launcher.CudaKernels, "register", lambda kernels: registered.append(kernels))
    try:
        compiler = nvrtc.find_compiler("13.0", REPOSITORY / "csrc_cuda")
    except cuda_toolkit.Unavailable as why:
        pytest.skip(str(why))
    launcher.register_nvrtc(compiler, 70)
    (kernels,) = registered
    with pytest.raises(RuntimeError, match=r"compute capability 7\.0, but the kernels need 7\.5 or newer"):
        kernels.prepare(70)
