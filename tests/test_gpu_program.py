"""`make gpu` without a GPU: the outcome of each step is reported, and the other steps still run."""

import sys
from pathlib import Path

import pytest
import torch

import warm_python
from source_tree import REPOSITORY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from gpu import Step, report, run, steps


def test_a_failed_step_is_reported_and_a_report_has_every_step(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+b") as log:
        log.write(b"what an earlier step has said\n")
        code = "print('the last line', flush=True); raise SystemExit(3)"
        outcome = run(Step("step", [sys.executable, "-c", code], 60), log, 60)
    assert (outcome.result, outcome.detail) == ("failed", "exit status 3; last: the last line")
    names = [step.name for step in steps(tmp_path, tmp_path, is_trial=False)]
    done = [{"step": name, "result": "failed", "seconds": 1.0, "detail": "a | b"} for name in names]
    table = report({"steps": done, "codec": {"aot": None}, "overhead": None})
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == names
    assert {line.count("|") for line in table.splitlines()} == {5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
@pytest.mark.parametrize("name", ["codec aot", "overhead"])
def test_benchmarks_accept_the_arguments_of_the_steps(tmp_path: Path, name: str) -> None:
    [step] = (step for step in steps(tmp_path, tmp_path, is_trial=False) if step.name == name)
    called = warm_python.run(list(step.command)[1:], cwd=REPOSITORY, check=False)
    assert called.returncode == 1
    assert called.stderr == "--device cuda: this torch cannot use a GPU\n"
