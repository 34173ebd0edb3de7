"""Plain attach in two workers of Ray Train, and recovery after one worker has died."""

import json
import os
import sys
from pathlib import Path

import pytest
from rank_programs import RANKS

import programs
from documentation import ROOT

pytestmark = pytest.mark.integrations
pytest.importorskip("ray.train")


def test_restarted_workers_resume_bitwise_equal(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).with_name("ray_rank.py"), str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    with programs.ray_files() as environment:
        programs.run(command, timeout_s=200, cwd=tmp_path, env={**os.environ, **environment, "PYTHONPATH": paths})
    straight, saved, resumed = (
        [json.loads((tmp_path / f"{name}{rank}.json").read_text()) for rank in RANKS]
        for name in ("", "saved-", "resumed-")
    )
    assert [result["steps"] for result in straight] == [6, 6]
    assert straight[0]["weights"] == straight[1]["weights"]
    assert saved[0] != saved[1]
    assert [result["first"] for result in resumed] == [3, 3]
    assert [result["loaded"] for result in resumed] == saved
    assert [result["during"] for result in resumed] == [result["during"] for result in straight]
