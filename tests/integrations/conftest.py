"""Fixtures of programs that run on two ranks; the program of test_x.py is x_rank.py."""

from pathlib import Path

import pytest
import rank_programs
from rank_programs import Found


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the program; return the folder to which both ranks have written."""
    program = request.path.with_name(f"{request.path.stem.removeprefix('test_')}_rank.py")
    folder = tmp_path_factory.mktemp(program.stem)
    rank_programs.run(program, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """The results of each rank."""
    return rank_programs.found_in(folder)
