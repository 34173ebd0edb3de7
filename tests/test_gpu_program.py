"""`make gpu` without a GPU: the outcome of each step is reported, and the other steps still run."""

import sys
from pathlib import Path

import pytest
import torch

import warm_python
from source_tree import REPOSITORY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from gpu import Outcome, Step, report, run, steps

PRINTS = "print('the last line', flush=True)"


def outcome_of(
    folder: Path, code: str, *, limit_s: float = 60, left_s: float = 60, needs: str | None = None
) -> Outcome:
    with open(folder / "log", "w+b") as log:
        log.write(b"what an earlier step has said\n")
        return run(Step("step", [sys.executable, "-c", code], limit_s, needs=needs), log, left_s)


@pytest.mark.parametrize(
    ("code", "options", "result", "detail"),
    [
        (PRINTS, {}, "passed", "the last line"),
        ("pass", {}, "passed", "it printed nothing"),
        (f"{PRINTS}; raise SystemExit(3)", {}, "failed", "exit status 3; last: the last line"),
        (f"{PRINTS}; import time; time.sleep(600)", {"limit_s": 2}, "timed out", "after 2 s; last: the last line"),
        (PRINTS, {"left_s": 1}, "not run", "no time left (--deadline)"),
        (PRINTS, {"needs": "no-such-program"}, "skipped", "no-such-program is not on PATH"),
    ],
)
def test_outcomes_of_a_step(tmp_path: Path, code: str, options: dict[str, float], result: str, detail: str) -> None:
    outcome = outcome_of(tmp_path, code, **options)
    assert (outcome.result, outcome.detail) == (result, detail)
    assert outcome.is_good == (result in ("passed", "skipped"))


def test_a_report_without_figures_has_every_step(tmp_path: Path) -> None:
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
