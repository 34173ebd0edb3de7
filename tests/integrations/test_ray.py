"""Plain attach under Ray Train, in two workers: what trains, and what comes back when one of them has died."""

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
    """Where the workers of Ray have written."""
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, RANK_PROGRAM, str(folder), "ray"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with programs.ray_files() as environment:
        programs.run(command, timeout_s=200, cwd=folder, env={**os.environ, **environment, "PYTHONPATH": paths})
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank has found in a plain loop that torchrun started."""
    folder = tmp_path_factory.mktemp("plain")
    rank_programs.run(RANK_PROGRAM, folder)
    return rank_programs.found_in(folder)


def written(folder: Path, name: str) -> list[Any]:
    """What each rank has written under a name."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_every_step_is_heard_of(found: Found, name: str) -> None:
    assert [one[name]["steps"] for one in found] == [STEPS, STEPS]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_weights_are_those_of_a_plain_loop(found: Found, plain: Found, name: str) -> None:
    assert [one[name] for one in found] == [one[name] for one in plain]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_ranks_are_equal_in_the_end(found: Found, name: str) -> None:
    first, second = (one[name] for one in found)
    assert (first["during"] == second["during"]) == (name in GRADIENTS)
    assert first["weights"] == second["weights"]


def test_workers_that_start_again_go_on_bit_for_bit(folder: Path, found: Found) -> None:
    saved, resumed = written(folder, "saved"), written(folder, "resumed")
    assert saved[0] != saved[1]
    assert [one["first"] for one in resumed] == [STOP, STOP]
    assert [one["loaded"] for one in resumed] == saved
    assert [one["during"] for one in resumed] == [one["decentralized"]["during"] for one in found]
