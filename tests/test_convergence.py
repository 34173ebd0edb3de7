"""The convergence benchmark: a short run with all that it writes, and a rank that fails."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import programs
from source_tree import REPOSITORY

pytestmark = pytest.mark.slow

TIMEOUT_S = 150  # a busy machine, or one that compiles the kernels meanwhile
LABELS = [
    "GradientAllReduce",
    "ByteGrad",
    "Decentralized, all",
    "Decentralized, shift_one",
    "LowPrecisionDecentralized",
    "AsyncModelAverage",
]
# Of 4 steps, so that several warm-ups are of one step.
QADAM_LABELS = [
    "GradientAllReduce",
    "QAdam, 8 bits, warm-up 1",
    "QAdam, 1 bit, warm-up 1",
    "QAdam, 1 bit, warm-up 2",
]


def run_benchmark(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "convergence.py"), "--quick", "--ranks", "2"]
    command += ["--output", str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return programs.run(command, env=environment, timeout_s=TIMEOUT_S, check=False)


def test_quick_run_trains_and_reports(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path)

    assert run.returncode == 0, run.stderr
    assert "step/s" in run.stderr, "the progress bar"
    [results] = tmp_path.glob("convergence-*.json")
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    tasks = json.loads(results.read_text())["tasks"]
    assert [task["task"] for task in tasks] == ["gpt", "qadam", "digits"]
    for task in tasks:
        rows = task["rows"]
        baseline = rows[0]
        labels = [row["contestant"].removesuffix(" 500 ms").removesuffix(" 20 ms").rstrip(",") for row in rows]
        assert labels == (QADAM_LABELS if task["task"] == "qadam" else LABELS)
        for row in rows:
            assert f"| {row['contestant']} |" in run.stdout
            [losses], [held_out_loss], [accuracy] = row["losses"], row["held_out_loss"], row["held_out_accuracy"]
            assert all(map(math.isfinite, losses))
            assert losses[0] == baseline["losses"][0][0], "same weights, same batches"
            if task["task"] != "qadam":  # whose second moment does not settle in so few steps
                assert losses[-1] < losses[0] - 0.2, "it learns"
                assert held_out_loss < losses[0]
                assert abs(row["loss_difference_percent"][0]) < 5
            assert 0 < accuracy < 1
            assert row["step_sent_bytes"][0] > 0
        sent = [row["step_sent_bytes"][0] / baseline["step_sent_bytes"][0] for row in rows]
        if task["task"] == "qadam":  # one or two steps of four in full
            assert sent[1:] == pytest.approx([(1 + 3 / 4) / 4, (1 + 3 / 32) / 4, (2 + 2 / 32) / 4], rel=0.03)
        else:  # 8 bits and a header for each block of 2048 elements, or for each parameter that is smaller
            assert 0.25 <= sent[1] < 0.26


def test_failing_ranks_end_it_with_their_message(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path, "--tasks", "digits", TORCHBAGUA_NATIVE="no such path")

    assert run.returncode == 1
    assert "ended with 1" in run.stderr
    assert "no such path" in run.stderr
    assert list(tmp_path.iterdir()) == []
