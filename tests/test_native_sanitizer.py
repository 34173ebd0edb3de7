"""No input makes the native kernels access memory outside their tensors: a fuzzer with AddressSanitizer.

It calls the CPU's kernels with arbitrary wires, corrupted wires, and mostly wrong block tables.

python tests/test_native_sanitizer.py --seconds 600 --seed 1     searches longer
"""

import argparse
import collections
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

import programs
from native_codecs import CODECS, OPS, Codec
from source_tree import COMPILER
from torchbagua.native import loader, recipe
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.native.qadam import MOMENTA_CODECS

LENGTHS = (1, 7, 31, 32, 33, 64, 128, 1000, 4096, 4097, 9000)
EXTREMES = (-(2**63), -1, 0, 1, 2, 2**31, 2**62, 2**63 - 8, 2**63 - 1)


def good_table(codec: Codec, lengths: list[int]) -> tuple[list[list[int]], int, int]:
    """Return the rows of a table whose blocks fill x and the wire to the last byte, and the sizes of x and the wire."""
    rows, start, payload = [], 0, codec.header_bytes * len(lengths)
    for index, length in enumerate(lengths):
        rows.append([*codec.row(start, length, codec.header_bytes * index, payload)])
        start += length
        payload += codec.payload_bytes(length)
    return rows, start, payload


def corrupt(rows: list[list[int]], draw: random.Random) -> None:
    """Change one field of one row: by a little, to an extreme, or to anything."""
    row = draw.choice(rows)
    field = draw.randrange(len(row))
    kind = draw.randrange(4)
    if kind < 2:
        row[field] += draw.choice((-8, -4, -1, 1, 4, 8))
    elif kind == 2:
        row[field] = draw.choice(EXTREMES)
    else:
        row[field] = draw.randrange(-(2**63), 2**63)
    row[field] = min(max(row[field], -(2**63)), 2**63 - 1)


def own_memory(tensor: Tensor, draw: random.Random) -> Tensor:
    """Return the values in an allocation that ends with them and may begin before them: reads past them are found."""
    skipped = draw.randrange(4)
    return torch.cat((tensor.new_zeros(skipped), tensor.flatten()))[skipped:].view(tensor.shape)


def fuzz_once(draw: random.Random) -> bool:
    """Call an operation once; return whether it accepted the table. Raises every error but refusals of the table."""
    codec = draw.choice(CODECS)
    lengths = [min(draw.choice(LENGTHS), codec.longest) for _ in range(draw.randrange(1, 5))]
    rows, num_elements, wire_bytes = good_table(codec, lengths)
    num_rows = draw.randrange(1, 5)
    wires = own_memory(torch.randint(0, 256, (num_rows, wire_bytes), dtype=torch.uint8), draw)
    if (
        draw.random() < 0.5
    ):  # a sparse codec skips a payload whose indices are not in order, and random bytes seldom are
        for wire in wires:
            codec.native("encode")(torch.randn(num_elements), torch.tensor(rows, dtype=torch.int64), wire)
            for _ in range(draw.randrange(3)):
                wire[draw.randrange(wire_bytes)] ^= 1 << draw.randrange(8)
    for _ in range(draw.choice((0, 1, 1, 2))):
        corrupt(rows, draw)
    table = torch.tensor(rows, dtype=torch.int64)
    x = own_memory(torch.randint(-(2**31), 2**31, (num_elements,)).to(torch.int32).view(torch.float32), draw)
    x = x.to(draw.choice(ELEMENT_TYPES))
    wire = own_memory(wires[0], draw)
    calls: dict[str, tuple[Any, ...]] = {
        "encode": (x, table, wire),
        "decode": (wire, table, x),
        "decode_mean": (wires, table, float(num_rows), own_memory(x.float(), draw)),
        "decode_mean_encode": (wires, table, float(num_rows), wire),
        "encode_feedback": (x.float(), own_memory(x.float(), draw), table, wire, own_memory(x.float(), draw)),
        "decode_mean_encode_feedback": (wires, table, 2.0, x.float(), wire, own_memory(x.float(), draw)),
    }
    if codec.name in MOMENTA_CODECS:
        cut = draw.randrange(num_elements + 1)
        momenta = [own_memory(part.to(draw.choice(ELEMENT_TYPES)), draw) for part in x.split([cut, num_elements - cut])]
        numbers = momenta, [0.9, 0.5], [0.1, 0.5]
        values, left_out = own_memory(x.float(), draw), own_memory(x.float(), draw)
        calls["encode_momenta"] = x.float(), table, wire, *numbers
        calls["encode_momenta_feedback"] = x.float(), values, table, wire, left_out, *numbers
        calls["decode_gradients"] = wire, table, values, *numbers
    operation = draw.choice(sorted(calls))
    try:
        codec.native(operation)(*calls[operation])
    except ValueError as error:
        if ": table must be rows " not in str(error):
            raise
        return False
    return True


def runtime_library(name: str) -> Path | None:
    """Return a runtime library of the compiler, None if it has none of that name."""
    if shutil.which(COMPILER[0]) is None:
        return None
    found = programs.run([*COMPILER, f"-print-file-name={name}"])
    path = Path(found.stdout.strip())
    return path if path.is_absolute() else None


def compile_library(library: Path, *flags: str) -> None:
    csrc = loader.sources()
    includes = [f"-I{path}" for path in (csrc, *include_paths())]
    links = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu"]
    command = [*COMPILER, *recipe.CPU.cxx_flags, "-O1", "-g1", "-fsanitize=address", "-fPIC", "-shared"]
    command += [*flags, *includes, *map(str, recipe.source_files(recipe.CPU, csrc)), "-o", str(library), *links]
    programs.run(command, timeout_s=240)


def fuzz(library: Path, seconds: float, seed: int) -> "subprocess.CompletedProcess[str]":
    # Python itself is C: the sanitizer finds __cxa_throw to wrap only if the C++ library is preloaded with it.
    preloaded = [str(runtime_library(name)) for name in ("libasan.so", "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        # Python does not free all its memory. A huge allocation must fail without ending the process.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    command = [sys.executable, __file__, "--library", library, "--seconds", str(seconds), "--seed", str(seed)]
    return programs.run(command, env=environment, check=False, timeout_s=seconds + 120)


@pytest.mark.release
def test_fuzzer_finds_no_overrun_and_detects_a_planted_one(tmp_path: Path) -> None:
    if runtime_library("libasan.so") is None:
        pytest.skip("the C++ compiler has no libasan.so")
    checked, unchecked = tmp_path / "checked.so", tmp_path / "unchecked.so"
    compile_library(checked)
    compile_library(unchecked, "-DTORCHBAGUA_UNCHECKED_TABLES")

    finished = fuzz(checked, seconds=2, seed=0)
    overrun = fuzz(unchecked, seconds=2, seed=0)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "AddressSanitizer" not in finished.stderr
    accepted, refused = (int(word) for word in finished.stdout.split() if word.isdigit())
    assert accepted > 50
    assert refused > 50
    assert overrun.returncode != 0
    assert "ERROR: AddressSanitizer" in overrun.stderr


def fuzz_library(library: Path, seconds: float, seed: int) -> None:
    """Call the operations of a library, in the process of `fuzz`."""
    torch.ops.load_library(library)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    counts: collections.Counter[bool] = collections.Counter()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        counts[fuzz_once(draw)] += 1
    print(f"{counts[True]} calls accepted, {counts[False]} refused, {OPS.cpu_instruction_set()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.library:
        fuzz_library(arguments.library, arguments.seconds, arguments.seed)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "checked.so"
        compile_library(library)
        result = fuzz(library, arguments.seconds, arguments.seed)
    print(result.stdout, end="")
    sys.exit(result.stderr if result.returncode != 0 else 0)
