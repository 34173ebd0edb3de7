"""`make gpu` without a GPU: benchmarks accept the arguments of its steps."""

import sys
from pathlib import Path

import pytest
import torch

import warm_python
from source_tree import REPOSITORY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from gpu import steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
@pytest.mark.parametrize("name", ["codec aot", "overhead"])
def test_benchmarks_accept_the_arguments_of_the_steps(tmp_path: Path, name: str) -> None:
    [step] = (step for step in steps(tmp_path, tmp_path, is_trial=False) if step.name == name)
    called = warm_python.run(list(step.command)[1:], cwd=REPOSITORY, check=False)
    assert called.returncode == 1
    assert called.stderr == "--device cuda: this torch cannot use a GPU\n"
