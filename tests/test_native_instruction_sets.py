"""The CPU's kernels under every instruction set that this CPU has."""

import os
import sys
from pathlib import Path

import pytest
import torch

import programs
from torchbagua import native

INSTRUCTION_SETS = ("default", "avx2", "avx512")


def test_chosen_instruction_set() -> None:
    native.load()
    expected = os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability().lower())
    chosen = torch.ops.torchbagua.cpu_instruction_set()
    assert chosen == (expected if expected in INSTRUCTION_SETS else "default")


@pytest.mark.release
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_tests_pass_under_an_instruction_set(name: str) -> None:
    best = torch.backends.cpu.get_cpu_capability().lower()
    if name not in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1 if best in INSTRUCTION_SETS else 1]:
        pytest.skip(f"this CPU has no {name}: its best is {best}")
    native.load()
    if name == torch.ops.torchbagua.cpu_instruction_set():
        return  # the tests of this process use it
    folder = Path(__file__).parent
    files = [str(folder / f"test_native_{part}.py") for part in ("kernels", "operations", "instruction_sets")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu or chosen", *files]
    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": name})
