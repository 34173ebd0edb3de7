"""Fixtures of programs that run on two ranks; each file's fixture `folder` runs its program."""

from pathlib import Path

import pytest
import rank_programs
from rank_programs import Found


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """The results of each rank."""
    return rank_programs.found_in(folder)
