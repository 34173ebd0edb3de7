"""The benchmarks' programs from end to end."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import programs
import warm_python
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import horizon_ranks
import host_time
from convergence_sweep import TUNING_SEED, load
from convergence_tasks import TASKS
from horizon_methods import DDP
from horizon_model import StackedGPT
from horizon_optimizers import AdamW, Tick
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from torchbagua.cli.demo.train import learning_rate_factor

STEPS = 6
TIMEOUT_S = 150  # for a busy machine, or one that also compiles the kernels


def test_the_hosts_work_for_a_bucket_is_counted_and_timed(tmp_path: Path) -> None:
    program = [str(REPOSITORY / "benchmarks" / "host_time.py"), "--ranks", "2", "8"]
    run = warm_python.run([*program, "--rounds", "3", "--json", str(tmp_path / "result.json")], cwd=REPOSITORY)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["ranks"] for row in result["results"]] == [2, 8]
    for row in result["results"]:
        assert row["launches"] + row["nccl_calls"] == sum(row["calls_by_name"].values())
        assert row["nccl_calls"] == 2, "one for each phase"
        # Encode, reduce and decode; their number does not grow with the number of ranks.
        assert 3 <= row["launches"] <= host_time.MOST_LAUNCHES
        assert row["host_us"] > result["floor_us"] > 0
        assert f"| {row['ranks']} | {row['launches']} | 2 | {row['host_us']:.1f} |" in run.stdout
    assert "git_revision" in result["environment"]


def test_recorded_trainings_need_not_be_repeated() -> None:
    path = REPOSITORY / "benchmarks" / "results" / "convergence.json"
    recorded = json.loads(path.read_text())
    settings = recorded["settings"]
    document, changed = load(path, settings, {task: settings[f"steps of {task}"] for task in TASKS})
    assert changed == []
    assert document == recorded


def run_convergence(results: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "convergence.py"), "--quick", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    options = {"env": environment, "timeout_s": TIMEOUT_S, "check": False}
    return programs.run([*command, "--json", str(results), *arguments], **options)


@pytest.mark.release
def test_a_sweep_of_convergence_continues_from_its_file(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    first = run_convergence(results, "--tasks", "gpt", "--only", "ddp")
    assert first.returncode == 0, first.stderr
    assert "step/s" in first.stderr, "the progress bar"
    before = json.loads(results.read_text())["trainings"]
    assert [record["seed"] for record in before] == [TUNING_SEED, 0]

    contestants = ["ddp", "powersgd_hook", "qadam_1bit", "async", "fsdp_weights_8_gradients_8"]
    run = run_convergence(results, "--tasks", "gpt", "--only", *contestants)
    assert run.returncode == 0, run.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(results.read_text())
    assert document["trainings"][:2] == before
    assert "git_revision" in document["environments"][0]
    trainings = [record for record in document["trainings"] if record["seed"] == 0]
    assert [record["contestant"] for record in trainings] == contestants
    for record in trainings:
        assert record["held_out_losses"][0] == pytest.approx(math.log(256), rel=0.1), "that of guessing"
        assert record["held_out_losses"][-1] < 5
        assert record["evaluated_steps"] == [0, 1, 2, 3, 4]
        assert f"| {record['label']} |" in run.stdout
    if sys.platform == "linux":  # each of two ranks sends each element once; QAdam sends float32 and then one bit
        plain, _, one_bit, _, sharded = (8 * each["sent_bytes_a_step"] / each["num_elements"] for each in trainings)
        assert plain == pytest.approx(32, rel=0.02)
        assert one_bit == pytest.approx((32 + 3) / 4, rel=0.03)
        assert sharded == pytest.approx(3 * 8 / 2, rel=0.03), "half of the weights twice, and of the gradients"

    refused = run_convergence(results, "--ranks", "4")
    assert refused.returncode == 2
    assert "ranks=2 in the file, 4 now" in refused.stderr
    assert json.loads(results.read_text()) == document


def test_ddp_of_horizon_equals_one_worker_with_the_joint_batch() -> None:
    model = StackedGPT(width=32, num_layers=2)
    text = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    task = Task.from_text(model, text, torch.device("cpu"), num_held_out=8)
    trained = Trainings(task, "adamw", [Group(DDP(), [Setup(0, rate) for rate in (1e-3, 3e-3)])], 2, STEPS)
    trained.run()
    assert torch.equal(trained.weights, trained.weights[:, :1].expand_as(trained.weights))
    generators = [torch.Generator().manual_seed(worker) for worker in range(NUM_WORKERS)]
    flat = model.initial_weights(0)[None].repeat(2, 1)
    optimizer = AdamW(flat[:, None], model)
    for step in range(STEPS):
        starts = torch.cat(
            [torch.randint(len(task.train) - 64, (2, 1), generator=generator) for generator in generators]
        )
        windows = task.train[starts + torch.arange(65)].long().expand(2, -1, -1)
        leaves = [view.detach().requires_grad_() for view in model.views(flat)]
        grads = torch.autograd.grad(model.losses(leaves, windows).sum(), leaves)
        rates = torch.tensor([1e-3, 3e-3]).view(2, 1, 1) * learning_rate_factor(step, STEPS)
        corrections = torch.tensor([1 - 0.9 ** (step + 1), math.sqrt(1 - 0.95 ** (step + 1)), math.nan])
        joint = torch.cat([grad.flatten(1) for grad in grads], 1)[:, None]
        optimizer.step(joint, Tick(rates, *corrections.unbind()))
    # Adam divides gradients of about its epsilon by themselves, so rounding changes a few weights by a whole step.
    assert (trained.weights[:, 0] - flat).abs().mean() < 1e-5
    losses = model.losses(model.views(flat), task.held_out.expand(len(flat), -1, -1))
    assert trained.losses[-1].tolist() == pytest.approx(losses.tolist(), abs=1e-4)


def test_the_stored_results_of_horizon_on_separate_ranks_have_their_counterparts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["horizon_ranks.py", "--show"])
    assert horizon_ranks.main() == 0
    stored = json.loads((REPOSITORY / "benchmarks" / "results" / "horizon-ranks.json").read_text())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(stored["trainings"])


def test_a_short_run_of_horizon_and_its_table(tmp_path: Path) -> None:
    path = tmp_path / "horizon.json"
    program = [REPOSITORY / "benchmarks" / "horizon.py", "--quick", "--width", "32", "--layers", "1"]
    program += ["--json", path, "--rows", "adamw_ddp", "muon_diloco_10"]
    for _ in range(2):  # the second continues: nothing is missing
        finished = warm_python.run(program, cwd=REPOSITORY)
        assert "| DDP | AdamW |" in finished.stdout
    assert len(json.loads(path.read_text())["trainings"]) == 5 + 3


@pytest.mark.slow
def test_a_short_run_of_elastic_and_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    program = [REPOSITORY / "benchmarks" / "elastic.py", "--quick", "--json", path, "--only", "kill", "generations"]
    finished = warm_python.run(program, cwd=REPOSITORY, timeout_s=TIMEOUT_S)
    assert "| one of four killed | loopback | 0.1 | 1 |" in finished.stdout
    kill, generations = json.loads(path.read_text())["sections"]
    [killed] = kill["rounds"]
    assert killed["num_changes"] >= 1
    assert killed["noticed_s"] < killed["begun_s"] < killed["recovered_s"]
    assert killed["join"]["begun_s"] < killed["join"]["recovered_s"]
    assert generations["num_changes"] >= 4
    assert [len(pair) for pair in generations["resources"]] == 3 * [2], "of the three ranks that stayed"
