"""Trainings execute no more files and lines of the package than docs_build/walk.json has recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "docs_build" / "walk.py"


@pytest.mark.slow
def test_trainings_execute_no_more_than_recorded() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--check"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
