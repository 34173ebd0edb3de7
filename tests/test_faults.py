"""Ranks that die, stop or raise within a step, in real processes: the others raise, and everybody can exit."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAULTY_RANK = Path(__file__).parent / "faulty_rank.py"
SIZE = 3
TIMEOUT_S = 4.0


def run_with_fault(fault: str, algorithm: str, store: Path) -> tuple[list[str], float]:
    """Run SIZE processes of which the last goes wrong; return what the others print, and their seconds until exit."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(FAULTY_RANK), str(rank), str(SIZE), str(store), fault, algorithm],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        faulty = processes[-1].stdout
        assert faulty is not None
        assert any(line.strip() == "fault" for line in faulty)
        start = time.monotonic()
        outputs = [process.communicate(timeout=60)[0] for process in processes[:-1]]
        assert [process.returncode for process in processes[:-1]] == [0] * (SIZE - 1), outputs
        return outputs, time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("fault", "algorithm"),
    [("kill", "bytegrad"), ("stop", "bytegrad"), ("raise", "bytegrad"), ("stop", "gradient_allreduce")],
)
def test_survivors_raise_and_exit(fault: str, algorithm: str, tmp_path: Path) -> None:
    outputs, seconds_until_exit = run_with_fault(fault, algorithm, tmp_path / "store")
    for output in outputs:
        assert "raised on MainThread: RuntimeError" in output, output
        assert re.search("(all_to_all|all_gather) of gradient bucket . over the world group failed on rank", output), (
            output
        )
        assert "lanes []" in output, output
        raised_after = float(re.findall("seconds (.*)", output)[0])
        # A rank that is gone is noticed at once, one that stands still after the timeout.
        assert raised_after < (TIMEOUT_S + 2 if fault == "stop" else 2), output
    assert any(f"from rank {SIZE - 1}" in output or f"to rank {SIZE - 1}" in output for output in outputs), outputs
    assert seconds_until_exit < TIMEOUT_S + 5, outputs
