"""The library of CUDA kernels without a GPU: it compiles, links, loads and refuses; nothing is launched."""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

import programs
from host_kernels import CSRC, HostKernels
from pretended_cuda import pretend_cuda
from source_tree import COMPILER, REPOSITORY, copy_sources, replace_cpu_sources, run_python
from torchbagua.native import cuda_toolkit, recipe
from torchbagua.native.cuda_toolkit import Unavailable

try:
    TOOLKIT = cuda_toolkit.usable_toolkit("13.0")
except Unavailable as why:
    pytest.skip(f"no CUDA toolkit to compile with: {why}", allow_module_level=True)
pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason=f"{COMPILER[0]} is not on PATH")

# Prints how the CUDA kernels were loaded, then a refusal: no tensor here is on CUDA.
LOAD_AND_CALL = """
import torch
from torchbagua import native
native.load()
print({row.path for row in native.status() if row.device == "cuda"})
print(native.loader.loaded_library(native.loader.CUDA))
arguments = torch.zeros(16), torch.zeros(1, 4, dtype=torch.int64), torch.zeros(32, dtype=torch.uint8)
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
try:
    torch.ops.torchbagua.minmax_uint8_encode.default.redispatch(keys, *arguments)
except ValueError as error:
    print(error)
"""


# Needs the libraries that the real binding needs, and compiles fast.
SMALL_BINDING = """
extern "C" int aoti_torch_get_current_cuda_stream(int, void**);
int torchbagua_probe(void* place) { return aoti_torch_get_current_cuda_stream(0, &place) + cudaFree(place); }
"""


def needed_libraries(library: Path) -> set[str]:
    """Return the shared libraries that a library needs, without their versions."""
    assert shutil.which("readelf"), "readelf comes with the linker"
    printed = programs.run(["readelf", "-d", library]).stdout
    return {line.split("[")[1].split(".so")[0] for line in printed.splitlines() if "(NEEDED)" in line}


@pytest.mark.release
def test_bindings_compile_without_a_warning_and_launch_kernels_that_give_the_bytes_of_the_reference(
    host_kernels: HostKernels, tmp_path: Path
) -> None:
    """They are linked with a fake runtime, which runs the kernels on the host."""
    includes = [f"-I{CSRC}", *(f"-isystem={path}" for path in include_paths())]
    command = ["nvcc", "-c", *recipe.CUDA.nvcc_flags, *recipe.gencode_flags([90]), *includes]
    command += ["-Xcompiler=-fPIC,-Wall", "-Werror", "all-warnings", str(CSRC / recipe.CUDA.sources), "-o", "bind.o"]
    programs.run(command, cwd=tmp_path, timeout_s=200)

    runtime = Path(__file__).with_name("pretended_cuda_runtime.cpp")
    command = [*COMPILER, "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{TOOLKIT.folder}/include", "bind.o", str(runtime)]
    command += [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10", "-o", "bind.so"]
    programs.run(command, cwd=tmp_path)
    script = Path(__file__).with_name("cuda_library_on_host.py")
    command = [sys.executable, str(script), str(tmp_path / "bind.so"), str(host_kernels.library)]
    printed = programs.run(command, timeout_s=250).stdout
    *_, old_gpu, other_gpu, old_driver, other_error = printed.splitlines()
    (num_passed,) = re.findall(r"^(\d+) passed", printed, re.MULTILINE)
    assert int(num_passed) > 50
    assert old_gpu == (
        "torchbagua::minmax_uint8_encode: cuda:0 has compute capability 7.0, but the kernels need 7.5 or newer; "
        "set TORCHBAGUA_NATIVE=reference to run without them"
    )
    assert "cuda:0 has compute capability 10.3, for which this library was not built" in other_gpu
    assert "driver is too old: it supports CUDA 11.8, but this library was built with CUDA" in old_driver
    assert f"built with CUDA {TOOLKIT.version}" in old_driver
    assert "TORCHBAGUA_NATIVE=nvrtc" in old_driver
    assert "=reference" in old_driver
    assert other_error == "torchbagua::minmax_uint8_encode: some error of CUDA"


@pytest.mark.release
def test_library_compiled_at_first_use_loads_and_refuses_with_plain_torchs_messages(tmp_path: Path) -> None:
    environment = pretend_cuda(tmp_path / "cuda", REPOSITORY)
    environment["TORCHBAGUA_CACHE"] = str(tmp_path / "cache")
    status, out, err = run_python(LOAD_AND_CALL, tmp_path, **environment)
    assert status == 0, err
    path, library, refused = out.splitlines()
    assert path == "{'jit'}"
    assert Path(library).is_relative_to(tmp_path / "cache")
    form = "contiguous float32, bfloat16 or float16 [N] on cuda, got Float [16] on cpu"
    assert refused == f"torchbagua::minmax_uint8_encode: x must be {form}"
    assert not needed_libraries(Path(library)) & {"libcudart", "libc10_cuda"}, "they would tie it to one CUDA version"
    assert "libtorch_cuda" in needed_libraries(Path(library))


@pytest.mark.release
def test_wheel_built_with_a_cuda_torch_contains_both_libraries(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path / "checkout")
    replace_cpu_sources(checkout / "csrc_cuda")
    (checkout / "csrc_cuda" / recipe.CUDA.sources).write_text(SMALL_BINDING)
    # An nvcc that knows fewer architectures, as older versions do.
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    known = "case $* in --list-gpu-arch) printf 'compute_75\\ncompute_90\\n'; exit;; esac"
    nvcc.write_text(f'#!/bin/sh\n{known}\nexec {cuda_toolkit.find_nvcc()} "$@"\n')
    nvcc.chmod(0o755)
    environment = {**pretend_cuda(tmp_path / "cuda", checkout), "CUDA_HOME": str(tmp_path)}

    build = "import setuptools.build_meta as backend; backend.build_wheel('wheels')"
    status, out, err = run_python(build, checkout, **environment)

    assert status == 0, out + err
    assert (
        "arch=compute_75,code=sm_75 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90" in out
    )
    assert "compute_80" not in out
    (wheel,) = (checkout / "wheels").glob("*-cp310-abi3-*.whl")
    stems = [recipe.stem(binary, checkout / "csrc_cuda") for binary in (recipe.CPU, recipe.CUDA)]
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert sorted(libraries) == sorted(f"torchbagua/native/{stem}.abi3.so" for stem in stems)
        archive.extractall(tmp_path / "installed")
    library = tmp_path / "installed" / "torchbagua" / "native" / f"{stems[1]}.abi3.so"
    assert "libtorch_cuda" in needed_libraries(library)
    assert "libcudart" not in needed_libraries(library)


def test_the_toolkit_is_found_behind_a_script() -> None:
    assert [folder for folder in TOOLKIT.library_folders() if (folder / "libcudart_static.a").exists()]
    assert {80, 90, 100} <= set(TOOLKIT.architectures)


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "why"),
    [
        (None, "12.8", f"CUDA {TOOLKIT.version}, but torch was built with CUDA 12.8$"),
        (None, None, r"^this torch is built without CUDA$"),
        ("", "13.0", "nvcc was not found"),
        ("#!/bin/sh\necho no\n", "13.0", "does not respond like nvcc"),
    ],
)
def test_why_a_toolkit_is_not_usable(
    nvcc: str | None, torch_cuda: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nvcc` is the file in a toolkit of CUDA_HOME; none if it is empty."""
    if nvcc is not None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text(nvcc)
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    with pytest.raises(Unavailable, match=why):
        cuda_toolkit.usable_toolkit(torch_cuda)
