"""Fixtures of programs that run on two ranks; each file says in its fixture `folder` what runs."""

from pathlib import Path

import pytest
import rank_programs
from rank_programs import Found


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What each rank has found."""
    return rank_programs.found_in(folder)
