"""Plain attach in two workers of Ray Train: training, and recovery after one worker has died."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_programs
from rank_programs import GRADIENTS, RANKS, Found

import programs
from documentation import ROOT

pytestmark = pytest.mark.integrations
pytest.importorskip("ray.train")

RANK_PROGRAM = Path(__file__).parent / "ray_rank.py"
WEIGHTS = ("decentralized", "low_precision_decentralized", "diloco")
STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run Ray's workers; return the folder that contains their results."""
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, RANK_PROGRAM, str(folder), "ray"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with programs.ray_files() as environment:
        programs.run(command, timeout_s=200, cwd=folder, env={**os.environ, **environment, "PYTHONPATH": paths})
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank in a plain loop that torchrun started."""
    folder = tmp_path_factory.mktemp("plain")
    rank_programs.run(RANK_PROGRAM, folder)
    return rank_programs.found_in(folder)


def read_results(folder: Path, name: str) -> list[Any]:
    """Return the file of this name of each rank, in rank order."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_weights_equal_those_of_a_plain_loop_and_every_step_is_counted(found: Found, plain: Found, name: str) -> None:
    first, second = (result[name] for result in found)
    assert [first, second] == [result[name] for result in plain]
    assert [first["steps"], second["steps"]] == [STEPS, STEPS]
    assert (first["during"] == second["during"]) == (name in GRADIENTS)
    assert first["weights"] == second["weights"]


def test_restarted_workers_resume_bitwise_equal(folder: Path, found: Found) -> None:
    saved, resumed = read_results(folder, "saved"), read_results(folder, "resumed")
    assert saved[0] != saved[1]
    assert [result["first"] for result in resumed] == [STOP, STOP]
    assert [result["loaded"] for result in resumed] == saved
    assert [result["during"] for result in resumed] == [result["decentralized"]["during"] for result in found]
