"""The benchmarks' programs from end to end, and the floors beside which they report times."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import programs
import warm_python
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import host_time
from convergence_sweep import TUNING_SEED, load
from convergence_tasks import TASKS
from schedule import FRAME_BYTES_PER_PAYLOAD_BYTE, Schedule, schedule_floor_s

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


def test_schedule_floor_is_the_maximum_over_buckets() -> None:
    # Two buckets of 1 MiB, ready after 2 and 4 s. Each transfer takes 1 s, then 3 s.
    numels, schedule = [2**18] * 2, Schedule(1.0, [4.0, 2.0])

    def floor_s(transfer_s: float, bucket_cap_mb: float = 1.0) -> float:
        payload = 2 * transfer_s * 1e6 / 8 / FRAME_BYTES_PER_PAYLOAD_BYTE
        return schedule_floor_s(schedule, numels, bucket_cap_mb, payload, 1e6)

    assert floor_s(1.0) == pytest.approx(4 + 1), "the second is sent when it is ready; the link is idle before"
    assert floor_s(3.0) == pytest.approx(2 + 3 + 3), "the second waits for the first"
    assert floor_s(3.0, bucket_cap_mb=2.0) == pytest.approx(4 + 6), "one bucket, which is ready at the end"
    assert floor_s(0.0) == pytest.approx(4), "without bytes only compute time remains"


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
