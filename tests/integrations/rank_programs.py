"""Programs that run in two processes, and write the results of each rank."""

import json
import os
import re
from pathlib import Path
from typing import Any

import programs
from documentation import ROOT

RANKS = (0, 1)
GRADIENTS = ("gradient_allreduce", "bytegrad", "qadam")
WEIGHTS = ("decentralized", "low_precision_decentralized", "diloco", "async")

Found = list[dict[str, Any]]


def run(program: Path, folder: Path) -> None:
    """Run a program on both ranks, in `folder`, which is its argument."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    programs.run(programs.torchrun(program, str(folder)), env=environment, cwd=folder)


def found_in(folder: Path) -> Found:
    """Return the results of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


def assert_refused(found: Found, case: str, message: str) -> None:
    """Check that all ranks were refused with a message that matches `message`."""
    for results in found:
        assert re.search(message, results["refusals"][case]), results["refusals"][case]
