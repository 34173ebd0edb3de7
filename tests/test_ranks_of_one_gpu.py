"""Several ranks over NCCL on one GPU, in real processes: what they compute, and how they end if a rank dies."""

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import programs
from devices import require_gpu
from rank_of_one_gpu import by_number_of_ranks

TESTS = Path(__file__).parent
MOST_SECONDS = 45  # the timeout is 20 s
MOST_SECONDS_OF_WATCHDOG = 80  # torch's own watchdog took 60 s on an H100

BY_NCCL = ["bytegrad", "four bits", "reduced in bfloat16", "weights in 8 bits"]


def right(output: str) -> list[str]:
    return re.findall("^right: (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        pytest.param("nccl", 2, marks=pytest.mark.gpu),
        pytest.param("nccl", 4, marks=pytest.mark.gpu),
        pytest.param("gloo", 4, marks=pytest.mark.slow),  # tests the program
    ],
)
def test_averages_equal_the_oracle(backend: str, ranks: int) -> None:
    if backend == "nccl":
        require_gpu()
    names = by_number_of_ranks()[ranks]
    command = programs.forked_ranks(TESTS / "rank_of_one_gpu.py", backend, *names, ranks=ranks)
    done = programs.run(command, timeout_s=150, check=False)
    assert right(done.stdout) == names, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_NCCL)
def test_sharded_gradients_equal_the_oracle(gpu: torch.device, name: str) -> None:
    command = programs.forked_ranks(TESTS / "sharded_rank.py", "nccl", name, ranks=2)
    done = programs.run(command, timeout_s=120, check=False)
    assert right(done.stdout) == [name], f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("backend", "fault", "algorithm"),
    [
        pytest.param("gloo", "between", "all", marks=pytest.mark.slow),  # tests the program
        *(
            pytest.param("nccl", fault, algorithm, marks=pytest.mark.gpu)
            for fault, algorithms in {
                "between": ("all", "low_precision", "diloco"),
                "kill": ("all", "diloco", "async", "bytegrad"),
                "raise": ("all", "bytegrad"),
            }.items()
            for algorithm in algorithms
        ),
    ],
)
def test_survivor_ends(backend: str, fault: str, algorithm: str, tmp_path: Path) -> None:
    """With averaged weights, the survivor raises; with averaged gradients, NCCL or its watchdog ends it.

    "between": a rank is killed after all have compared their progress. What an aborted NCCL operation leaves is not
    written to the survivor's weights.
    """
    if backend == "nccl":
        require_gpu()
    arguments = [str(tmp_path / "store"), fault, algorithm, *(["nccl"] * (backend == "nccl"))]
    with ExitStack() as stack:
        survivor, faulty = (
            stack.enter_context(
                programs.started(
                    [sys.executable, str(TESTS / "faulty_rank.py"), str(rank), "2", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            for rank in range(2)
        )
        output, _ = faulty.communicate(timeout=90)
        assert "fault" in output.splitlines(), output
        since_s = time.monotonic()
        output, _ = survivor.communicate(timeout=90)
        status, seconds = survivor.returncode, time.monotonic() - since_s
    print(f"{fault}, {algorithm}: the survivor ended after {seconds:.1f} s, status {status}\n{output}")
    if algorithm == "bytegrad" and status != 0:
        assert status == -signal.SIGABRT
        assert seconds < MOST_SECONDS_OF_WATCHDOG
        return
    assert status == 0
    assert "raised on MainThread: CommunicationError" in output
    assert fault != "between" or "weights unchanged" in output.splitlines()
    assert seconds < MOST_SECONDS
