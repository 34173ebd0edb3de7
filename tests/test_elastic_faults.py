"""Real processes with faults at random moments: twenty trials of `make faults`."""

import os
import sys
from pathlib import Path

import pytest

import programs

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("first", range(0, 20, 4))
def test_every_rank_goes_on_or_ends_as_it_should(first: int, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    arguments = ["--trials", "4", "--seed", str(first), "--results", str(tmp_path / "results")]
    command = [sys.executable, "-W", "ignore", str(TESTS / "faults.py"), *arguments]
    programs.run(command, env={**os.environ, "PYTHONPATH": paths}, timeout_s=220)
