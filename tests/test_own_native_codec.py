"""A user's codec with native operations: it needs a file and a line each for plain torch, CPU and CUDA."""

import importlib
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

import programs
from source_tree import copy_sources, fork_python
from torchbagua.native import nvrtc, recipe

OWN = Path(__file__).with_name("own_codec")


# `native_of` returns the native operation of a name: the CPU's, or the kernels for CUDA, compiled for the host and
# launched as NVRTC's kernels are.
OF_CPU = """
def native_of(name):
    return getattr(torch.ops.torchbagua, name)
"""
OF_CUDA = """
from functools import partial
from pathlib import Path
import torch
from host_kernels import HostKernels, compile_kernels
from pretended_driver import PretendedDriver, kernels_on

compile_kernels(Path.cwd())
kernels = kernels_on(PretendedDriver(HostKernels(Path.cwd() / "kernels.so")))
torch.Tensor.get_device = lambda tensor: 0

def native_of(name):
    if NATIVE_OPS[name].is_cpu_only:
        return getattr(torch.ops.torchbagua, name)
    return partial(kernels.call, name)
"""

# Runs every operation over blocks of several lengths, native and in plain torch, in a separate process.
COMPARE = """
import torch
from torchbagua import native
from torchbagua.native.ops import NATIVE_OPS

native.load()
assert {row.path for row in native.status() if row.operation.startswith("first_")} == {"PATH"}, native.status()
lengths = torch.tensor([5, 1, 300, 64])
starts = lengths.cumsum(0) - lengths
table = torch.stack((starts, lengths, torch.zeros_like(lengths), 4 * torch.arange(4)), dim=1)
generator = torch.Generator().manual_seed(0)
xs = torch.randn(3, int(lengths.sum()), generator=generator)
wires = []
for x in xs:
    wires.append(torch.zeros(16, dtype=torch.uint8))
    torch.ops.torchbagua.first_encode(x, table, wires[-1])
rows = torch.stack(wires)

def both(name, *arguments):
    results = []
    for operation in (native_of(name), NATIVE_OPS[name]):
        own = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
        operation(*own)
        results.append(own)
    for one, other in zip(*results):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, other), name
    return results[0]

x, _, wire = both("first_encode", xs[0].bfloat16(), table, torch.zeros(16, dtype=torch.uint8))
decoded = both("first_decode", rows[0], table, torch.zeros_like(xs[0]))[2]
assert (decoded != 0).sum() == 4 and torch.equal(decoded[decoded != 0], xs[0][decoded != 0])
both("first_decode_mean", rows, table, 3.0, torch.zeros_like(xs[0]))
both("first_decode_mean_encode", rows, table, 3.0, torch.zeros(16, dtype=torch.uint8))
*_, left_out = both("first_encode_feedback", xs[0], xs[1], table, wire, torch.zeros_like(xs[0]))
assert (left_out == 0).sum() == 4
both("first_decode_mean_encode_feedback", rows, table, 3.0, xs[0], wire, torch.zeros_like(xs[0]))
try:
    torch.ops.torchbagua.first_decode(rows[0][:-1], table, torch.zeros_like(xs[0]))
except ValueError as error:
    print(error)

# The compressor lays such payloads out.
from dataclasses import dataclass
from torchbagua.codecs import NativeBlockCodec, TensorSpec

@dataclass(frozen=True)
class First(NativeBlockCodec):
    op_prefix = "first"

layout = First(64).layout(TensorSpec((150,), torch.float32, torch.device("cpu"), "x"), [0, 128, 150])
print(layout.table.tolist())
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the sources and add the codec in plain torch: a file, and a line in a list."""
    checkout = copy_sources(tmp_path / "checkout")
    shutil.copy(OWN / "first.py", checkout / "torchbagua" / "native")
    add(checkout / "torchbagua" / "native" / "__init__.py", "import blockk, ", "import blockk, first, ")
    return checkout


def add(file: Path, before: str, after: str) -> None:
    """Replace the only `before` in a file by `after`."""
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


def check(checkout: Path, path: str, of_device: str = OF_CPU, **variables: str) -> None:
    status, out, err = fork_python(of_device + COMPARE.replace("PATH", path), checkout, **variables)
    assert status == 0, err
    refused, table = out.splitlines()
    assert refused.startswith("torchbagua::first_decode: table must be rows (start, length >= 1, ")
    assert refused.endswith("of blocks within 370 elements of x and 15 bytes of wire, got row 3 = (306, 64, 0, 12)")
    assert table == str([[0, 64, 0, 0], [64, 64, 0, 4], [128, 22, 32, 32]])


def test_in_plain_torch_it_is_a_file_and_a_line(checkout: Path) -> None:
    check(checkout, "reference", TORCHBAGUA_NATIVE="reference")


def add_cuda(checkout: Path) -> None:
    """Add its kernels for CUDA: a file, and a line among the others."""
    shutil.copy(OWN / "first.cuh", checkout / "csrc_cuda" / "kernels")
    line = '#include "minmax_uint8.cuh"\n'
    add(checkout / "csrc_cuda" / "kernels" / "all.cuh", line, f'#include "first.cuh"\n{line}')


@pytest.mark.release
def test_kernels_for_the_cpu_are_one_more_file(checkout: Path, tmp_path: Path) -> None:
    shutil.copy(OWN / "first.cpp", checkout / "csrc_cuda" / "cpu")
    check(checkout, "jit", TORCHBAGUA_NATIVE="jit", TORCHBAGUA_CACHE=str(tmp_path / "cache"))


@pytest.mark.release
def test_with_kernels_for_cuda_it_is_one_more_of_each(checkout: Path) -> None:
    """NVRTC compiles them with the others, and nvcc compiles their binding without a warning."""
    add_cuda(checkout)
    csrc = checkout / "csrc_cuda"
    with suppress(ImportError):
        image = nvrtc.Compiler(importlib.import_module("cuda.bindings.nvrtc"), csrc).compile("sm_90")
        assert b".text.torchbagua_first_encode_feedback_float32\0" in image
    if shutil.which("nvcc") is not None:
        command = ["nvcc", "-c", *recipe.CUDA.nvcc_flags, *recipe.gencode_flags([90]), f"-I{csrc}"]
        command += [*(f"-isystem={path}" for path in include_paths()), "-Xcompiler=-fPIC,-Wall", "-Werror"]
        command += ["all-warnings", str(csrc / recipe.CUDA.sources), "-o", "bind.o"]
        programs.run(command, cwd=checkout, timeout_s=200)
        assert b"torchbagua_first_decode_mean_encode" in (checkout / "bind.o").read_bytes()
    shutil.copytree(OWN.parent, checkout / "tests", ignore=shutil.ignore_patterns("data", "__pycache__"))
    variables = {"TORCHBAGUA_NATIVE": "reference", "PYTHONPATH": f"{checkout}:{checkout / 'tests'}"}
    check(checkout, "reference", OF_CUDA, **variables)
