"""A rank of a sharded module that is killed in a backward, in real processes: all others raise, and can exit."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import programs

FAULTY_RANK = Path(__file__).with_name("sharded_faulty_rank.py")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "size"), [("flat", 3), ("weights", 3), ("hook", 4), ("backend", 4)])
def test_survivors_raise_and_exit(way: str, size: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                programs.started(
                    [sys.executable, str(FAULTY_RANK), str(rank), str(size), str(tmp_path / "store"), way],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            for rank in range(size)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * (size - 1) + [-signal.SIGKILL], outputs
    for output in outputs[:-1]:
        # Of the connections of a killed process the others hear at once; 20 s is the timeout.
        (seconds,) = re.findall(r"raised after ([\d.]+) s", output)
        assert float(seconds) < 10, output
        assert "lanes []" in output, output
    if way in ("hook", "backend"):  # else FSDP's own all-gather may fail first, which the lane works beside
        assert "CommunicationError: torchbagua: all_to_all of gradients of 2 over the world" in outputs[1], outputs
