"""The network benchmark: its measurements are plausible, and its namespaces are removed however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import programs
import warm_python
from torchbagua.cli.namespaces import existing_namespaces, remove_stale_namespaces, why_unavailable

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = [
    *("--ranks", "2", "--params", "0.5", "--steps", "1", "--rounds", "2", "--seconds", "0"),
    *("--no-straggler", "--link-rates"),
]
LIMIT_S = 60
pytestmark = pytest.mark.release


def namespaces_of(pid: int) -> list[str]:
    return [name for name in existing_namespaces() if name.startswith(f"tbnet-{pid}-")]


def wait_until(condition: Callable[[], Any], awaited: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for: {awaited}"
        time.sleep(0.05)
    return value


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start network.py with the given arguments; after the test, end processes that still run, first by SIGTERM."""
    with ExitStack() as stack:

        def start_benchmark(*arguments: str, is_emulated: bool = True, **environment: str) -> subprocess.Popen[str]:
            if is_emulated and (reason := why_unavailable()):
                pytest.skip(f"cannot emulate a network: {reason}")
            command = [sys.executable, str(BENCHMARKS / "network.py"), *SMALL, "--json", str(tmp_path / "r.json")]
            options = {"env": os.environ | environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(programs.started([*command, *arguments], **options))
            stack.callback(process.communicate, timeout=LIMIT_S)
            stack.callback(process.terminate)
            return process

        yield start_benchmark


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a dead process whose parent has not waited for it does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.alone
@pytest.mark.network
def test_shaped_network_is_as_slow_as_it_should_be(start: Start, tmp_path: Path) -> None:
    benchmark = start("--rates", "50mbit", "--only", "ddp", "bytegrad")
    output, errors = benchmark.communicate(timeout=2 * LIMIT_S)
    assert benchmark.returncode == 0, errors  # 1 if the library's bytes and the counters disagree
    assert "| ByteGrad |" in output
    [network] = json.loads((tmp_path / "r.json").read_text())["networks"]
    rows = {row["contestant"]: row for row in network["rows"]}
    # Two ranks send every element once: in 4 bytes, or in 1 byte plus headers.
    assert rows["ddp"]["counted_bytes"] == pytest.approx(4 * network["num_parameters"], rel=0.03)
    assert rows["bytegrad"]["recorded_bytes"] == pytest.approx(network["num_parameters"], rel=0.03)
    # 256 KiB of the 2 MB pass unshaped (tbf's burst), hence not the whole floor. No upper bound: machines are busy.
    assert rows["ddp"]["step_ms"] > 0.8 * rows["ddp"]["floor_ms"] > 250
    assert rows["bytegrad"]["step_ms"] < rows["ddp"]["step_ms"]
    assert namespaces_of(benchmark.pid) == []


@pytest.mark.alone
def test_without_the_tools_it_reports_that_and_runs_over_loopback(start: Start, tmp_path: Path) -> None:
    benchmark = start("--rates", "50mbit", "--only", "ddp", "bf16", PATH=str(tmp_path), is_emulated=False)
    output, errors = benchmark.communicate(timeout=2 * LIMIT_S)
    assert benchmark.returncode == 0, errors
    assert "No emulated network: " in output
    assert "Not measured: 50mbit" in output
    assert "| DDP bf16 hook |" in output


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("network-*.json")), ids=lambda path: path.stem)
def test_recorded_results_can_be_shown(path: Path) -> None:
    shown = warm_python.run([str(BENCHMARKS / "network.py"), "--show", str(path)])
    assert shown.stdout.count("| compute only |") == len(json.loads(path.read_text())["networks"])


@pytest.mark.network
@pytest.mark.parametrize(
    ("victim", "number", "status", "message"),
    [
        ("benchmark", signal.SIGINT, 128 + signal.SIGINT, "stopped by SIGINT"),
        ("benchmark", signal.SIGTERM, 128 + signal.SIGTERM, "stopped by SIGTERM"),
        ("rank", signal.SIGKILL, 1, "1mbit: rank 1 ended with -9"),
        ("benchmark", signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_nothing_is_left_whatever_ends_it(
    start: Start, victim: str, number: signal.Signals, status: int, message: str
) -> None:
    benchmark = start("--rates", "1mbit", "--only", "ddp")

    def pids_of_ranks() -> list[int]:
        """Return the processes of both ranks, once they run in their namespaces."""
        names = [f"tbnet-{benchmark.pid}-rank{rank}" for rank in range(2)]
        inside = [programs.run(["ip", "netns", "pids", name], check=False).stdout.split() for name in names]
        return [int(pid) for pids in inside for pid in pids] if all(inside) else []

    ranks = wait_until(pids_of_ranks, "ranks in their namespaces")
    left = set(namespaces_of(benchmark.pid))
    assert len(left) == 3, "the switch and two ranks"
    os.kill(benchmark.pid if victim == "benchmark" else ranks[1], number)
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == status
    assert message in errors
    if status < 0:  # the next benchmark removes them
        wait_until(lambda: not any(map(is_alive, ranks)), "ranks end with their parent")
        assert left <= set(remove_stale_namespaces())
    assert namespaces_of(benchmark.pid) == []
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--compute", "idle", "--only", "fsdp"), "--compute idle: FSDP2 and HSDP"), (("--rates", "fast"), "'fast'")],
)
def test_bad_arguments_are_refused(start: Start, arguments: tuple[str, ...], message: str) -> None:
    benchmark = start(*arguments, is_emulated=False)
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == 2
    assert message in errors
