"""How torchbagua chooses the source of its CUDA kernels, and its errors if it has none; torch's GPU is imitated."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pretended_cuda import pretend_cuda
from source_tree import REPOSITORY, build_empty_library, copy_sources, replace_cpu_sources, run_python
from torchbagua.native import cuda_toolkit, launcher, loader, nvrtc, recipe

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings, of the extra dev, is not installed"
)
TOOLKIT = cuda_toolkit.Toolkit(Path("/nowhere"), "13.0", (75, 80, 90, 120))

LOAD = """
from torchbagua import native
native.load()
print(native.loader.loaded_path(native.loader.CUDA))
"""


class TestChoice:
    """`choose` without loading, over an empty package folder."""

    @pytest.fixture(autouse=True)
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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

    @pytest.fixture
    def _nvcc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_toolkit, "usable_toolkit", lambda torch_cuda: TOOLKIT)

    @pytest.fixture
    def _no_nvrtc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    @pytest.mark.usefixtures("_nvcc")
    def test_built_library_comes_first(self, package: Path) -> None:
        built = package / f"{recipe.stem(recipe.CUDA, package.parents[1] / 'csrc_cuda')}.abi3.so"
        built.touch()
        choice = loader.choose(loader.CUDA)
        assert (choice.path, choice.library) == ("aot", built)
        assert loader.choose(loader.CPU).path == "jit"

    @pytest.mark.usefixtures("_nvcc")
    def test_nvcc_comes_next(self) -> None:
        choice = loader.choose(loader.CUDA)
        assert choice.path == "jit"
        assert "no library for cuda was built ahead of time; compiled at first use by" in choice.why
        assert choice.why.endswith("and nvcc 13.0")

    @pytest.mark.usefixtures("_nvcc")
    def test_nvcc_compiles_for_the_gpus_of_the_machine(self, package: Path) -> None:
        build = loader.choose(loader.CUDA).build
        assert build is not None
        assert build.architectures == (75, 80, 90, 120)
        flags = build.arguments()["extra_cuda_cflags"]
        assert [flag for flag in flags if "code=" in flag] == [
            "-gencode=arch=compute_75,code=sm_75",
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90,code=sm_90",
            "-gencode=arch=compute_120,code=sm_120",
            "-gencode=arch=compute_120,code=compute_120",
        ]
        assert "--fmad=false" in flags

    @pytest.mark.usefixtures("_nvcc")
    def test_libraries_for_other_gpus_are_other_files(self, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = loader.choose(loader.CUDA).library
        assert loader.choose(loader.CUDA).library == before
        monkeypatch.setattr(loader, "capabilities", lambda: [90])
        assert loader.choose(loader.CUDA).library != before

    @needs_nvrtc
    def test_nvrtc_comes_last(self) -> None:
        choice = loader.choose(loader.CUDA)
        assert (choice.path, choice.library) == ("nvrtc", None)
        assert "no library for cuda was built ahead of time, and nvcc was not found" in choice.why

    @pytest.mark.usefixtures("_no_nvrtc")
    def test_the_reference_choice_lists_the_reasons(self) -> None:
        choice = loader.choose(loader.CUDA)
        assert choice.path == "reference"
        for part in ("no library for cuda was built", "nvcc was not found", "cuda-python cannot be imported"):
            assert part in choice.why

    @pytest.mark.usefixtures("_no_nvrtc")
    @pytest.mark.parametrize(
        ("forced", "message"),
        [
            ("aot", "TORCHBAGUA_NATIVE=aot, but no library for cuda was built ahead of time"),
            ("jit", "TORCHBAGUA_NATIVE=jit, but nvcc was not found"),
            ("nvrtc", r"TORCHBAGUA_NATIVE=nvrtc, but cuda-python cannot be imported .*torchbagua\[cuda\]"),
        ],
    )
    def test_a_forced_path_that_is_unavailable_raises(
        self, forced: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHBAGUA_NATIVE", forced)
        with pytest.raises(RuntimeError, match=message):
            loader.choose(loader.CUDA)

    @needs_nvrtc
    @pytest.mark.usefixtures("_nvcc")
    def test_nvrtc_can_be_forced_and_affects_only_cuda(self, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (package / f"{recipe.stem(recipe.CUDA, package.parents[1] / 'csrc_cuda')}.abi3.so").touch()
        monkeypatch.setenv("TORCHBAGUA_NATIVE", "nvrtc")
        assert loader.choose(loader.CUDA).path == "nvrtc"
        assert loader.choose(loader.CPU).path == "jit"

    def test_reference_can_be_forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHBAGUA_NATIVE", "reference")
        assert loader.choose(loader.CUDA) == loader.Choice("reference", "TORCHBAGUA_NATIVE=reference")


def test_without_a_gpu_only_the_cpu_is_usable() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
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
        operations = ("decode", "decode_mean", "decode_mean_encode", "encode", "encode_feedback")
        names = [f"blockk_{operation}" for operation in operations]
        names += [f"low_rank_{operation}" for operation in ("combine", "gram", "product", "solve")]
        names += [f"{codec}_{operation}" for codec in ("minmax_uint4", "minmax_uint8") for operation in operations]
        names += ["qadam_form_gradients", "qadam_form_momenta", "qadam_update"]
        names += [f"{codec}_{operation}" for codec in ("sign1bit", "topk") for operation in operations]
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


def test_a_process_forked_after_cuda_was_used_does_not_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader.usable_devices() == [loader.CPU, loader.CUDA]
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert loader.usable_devices() == [loader.CPU]


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
