"""The convergence benchmark: the choice of trials, its tables, short runs, and its exit."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import programs
import ranks
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
from convergence_rank import train
from convergence_report import markdown_table, summarise
from convergence_sweep import MOST_RUNGS, TUNING_SEED, Sweep, Trial, load
from convergence_tasks import TASKS

TIMEOUT_S = 150  # for a busy machine, or one that also compiles the kernels


def sweep_to_the_end(losses: dict[int, float | None], contestant: str = "ddp", task: str = "gpt") -> list[Trial]:
    """Return all trials of one contestant. `losses` are by rung; it diverges if a loss is None or missing."""
    sweep = Sweep([task], [contestant], rungs=[-1, 0, 1], grows=True, seeds=[0, 1])
    records: list[dict[str, Any]] = []
    trials = []
    while (trial := sweep.next_trial(records)) is not None:
        trials.append(trial)
        record = {key: getattr(trial, key) for key in ("task", "contestant", "rung", "seed")}
        records.append(record | {"held_out_losses": [losses.get(trial.rung)]})
    assert sweep.cost(records, {task: 1}) == 0
    return trials


@pytest.mark.parametrize(
    ("losses", "rungs", "best"),
    [
        ({-1: 2, 0: 1, 1: 3}, [-1, 0, 1], 0),
        ({-1: 4, 0: 3, 1: 2, 2: 1, 3: None}, [-1, 0, 1, 2, 3], 2),
        ({-3: 2, -2: 1, -1: 1.5}, [-1, 0, 1, -2, -3], -2),
    ],
)
def test_the_best_rate_of_a_grid_is_trained_with_the_reported_seeds(
    losses: dict[int, float | None], rungs: list[int], best: int
) -> None:
    trials = sweep_to_the_end(losses)
    assert [trial.rung for trial in trials if trial.seed == TUNING_SEED] == rungs
    assert [(trial.rung, trial.seed) for trial in trials[len(rungs) :]] == [(best, 0), (best, 1)]
    assert [trial.rate for trial in trials[:3]] == pytest.approx([6.5e-3 / 1.8, 6.5e-3, 6.5e-3 * 1.8])


def test_a_sweep_ends_if_all_trials_diverge_and_qadam_needs_adam() -> None:
    trials = sweep_to_the_end({})
    assert len(trials) == MOST_RUNGS
    assert {trial.seed for trial in trials} == {TUNING_SEED}
    assert sweep_to_the_end({0: 1}, "qadam", "digits") == []
    assert sweep_to_the_end({0: 1}, "diloco", "gpt") == [], "gpt is too short for DiLoCo"


def test_contestants_try_the_rates_of_the_task() -> None:
    sweep = Sweep(["small_gpt"], ["ddp"], rungs=None, grows=False, seeds=[])
    assert sweep.cost([], {"small_gpt": 1}) == len(TASKS["small_gpt"].rungs) * TASKS["small_gpt"].step_cost


def test_recorded_trainings_need_not_be_repeated() -> None:
    path = REPOSITORY / "benchmarks" / "results" / "convergence.json"
    recorded = json.loads(path.read_text())
    settings = recorded["settings"]
    document, changed = load(path, settings, {task: settings[f"steps of {task}"] for task in TASKS})
    assert changed == []
    assert document == recorded


def training_record(
    contestant: str, rung: int, seed: int, losses: list[float | None], **overrides: Any
) -> dict[str, Any]:
    """Return the record of 100 steps on two ranks, with a model of 1000 elements."""
    record: dict[str, Any] = {"task": "gpt", "contestant": contestant, "label": contestant.upper(), "settings": ""}
    record |= {"rung": rung, "rate": 1.8**rung, "seed": seed, "warmup_steps": 0, "num_elements": 1000}
    record |= {"evaluated_steps": [0, 50, 100][: len(losses)], "held_out_losses": losses, "held_out_accuracy": 0.5}
    return record | {"sent_bytes_a_step": 4000.0, "num_rounds": None} | overrides


def test_tables_compare_with_all_reduce_and_with_the_target() -> None:
    half: dict[str, Any] = {"sent_bytes_a_step": 1000.0, "warmup_steps": 20, "num_rounds": 40}
    records = [
        *(training_record("ddp", 0, seed, [5, 3, 2]) for seed in (TUNING_SEED, 0)),
        training_record("ddp", 1, TUNING_SEED, [5, None]),
        training_record("ddp", 0, 1, [5, 3, 4]),
        *(training_record("async", 1, seed, [5, 2, 2.2], **half) for seed in (TUNING_SEED, 0)),
        *(training_record("bytegrad", 0, seed, [5, 4, 3.2]) for seed in (TUNING_SEED, 0)),
        training_record("qadam", 0, TUNING_SEED, [5, None]),
    ]
    document = {"settings": {"ranks": 2, "steps of gpt": 100}, "environments": [], "trainings": records}
    times = {"step_ms": {"50mbit": {"gpt": {"ddp": [100, 300, 200], "async": [100]}}}}
    section = summarise("gpt", document, times)

    ddp, asynchronous, bytegrad, qadam = section["rows"]
    assert section["target"] == pytest.approx(3 * 1.02), "2 % above the mean of the seeds"
    assert ddp["grid"] == [(1.0, 2), (1.8, math.inf)]
    assert ddp["target_steps"] == pytest.approx(50 * (5 - 3.06) / (5 - 3)), "linear between two evaluations"
    assert asynchronous["differences_percent"] == pytest.approx([10])
    assert asynchronous["bits"] == [8]
    assert asynchronous["steps_a_round"] == [(100 - 20) / 40]
    steps = 50 * (5 - 3.06) / (5 - 2)
    assert asynchronous["target_seconds"]["50mbit"] == pytest.approx((20 * 200 + (steps - 20) * 100) / 1e3), "warm-up"
    assert bytegrad["target_seconds"]["50mbit"] is None
    assert qadam["rate"] is None
    lines = markdown_table(section).splitlines()
    assert "| DDP | 1 (2) | 32.00 | 3.0000 (2.0000 to 4.0000) |  | 50.00 (50.00 to 50.00) | 48 | 9.7 |" in lines
    assert "| BYTEGRAD | 1 (1) | 32.00 | 3.2000 | +60.00 | 50.00 | never | never |" in lines
    assert any(line.startswith("| QADAM | none |  | diverges |") for line in lines)


def test_a_training_that_diverges_ends_with_a_result() -> None:
    ranks.init_default_group()
    steps: list[int] = []
    record = train(Trial("digits", "ddp", rung=40, seed=0), TASKS["digits"].load_data(), 32, 8, steps.append)
    assert record["held_out_losses"][0] == pytest.approx(math.log(10), rel=0.1)
    assert record["held_out_losses"][1:] == [None]
    assert steps == [1, 2]
    json.dumps(record, allow_nan=False)


def run_benchmark(results: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "convergence.py"), "--quick", "--ranks", "2"]
    command += ["--json", str(results), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return programs.run(command, env=environment, timeout_s=TIMEOUT_S, check=False)


@pytest.mark.release
def test_a_sweep_continues_from_its_file(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    first = run_benchmark(results, "--tasks", "gpt", "--only", "ddp")
    assert first.returncode == 0, first.stderr
    assert "step/s" in first.stderr, "the progress bar"
    before = json.loads(results.read_text())["trainings"]
    assert [record["seed"] for record in before] == [TUNING_SEED, 0]

    contestants = ["ddp", "powersgd_hook", "qadam_1bit", "async", "fsdp_weights_8_gradients_8"]
    run = run_benchmark(results, "--tasks", "gpt", "--only", *contestants)
    assert run.returncode == 0, run.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(results.read_text())
    assert document["trainings"][:2] == before
    assert "git_revision" in document["environments"][0]
    trainings = [record for record in document["trainings"] if record["seed"] == 0]
    assert [record["contestant"] for record in trainings] == contestants
    for record in trainings:
        assert record["held_out_losses"][0] == pytest.approx(math.log(256), rel=0.1), (
            "the initial loss is that of guessing"
        )
        assert record["held_out_losses"][-1] < 5
        assert record["evaluated_steps"] == [0, 1, 2, 3, 4]
        assert f"| {record['label']} |" in run.stdout
    if sys.platform == "linux":  # each of two ranks sends each element once; QAdam sends float32 and then one bit
        bits = [8 * record["sent_bytes_a_step"] / record["num_elements"] for record in trainings]
        plain, _, one_bit, _, sharded = bits
        assert plain == pytest.approx(32, rel=0.02)
        assert one_bit == pytest.approx((32 + 3) / 4, rel=0.03)
        assert sharded == pytest.approx(3 * 8 / 2, rel=0.03), "half of the weights twice, and of the gradients"

    refused = run_benchmark(results, "--ranks", "4")
    assert refused.returncode == 2
    assert "ranks=2 in the file, 4 now" in refused.stderr
    assert json.loads(results.read_text()) == document
