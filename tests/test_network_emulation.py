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
    "--ranks",
    "2",
    "--params",
    "0.5",
    "--steps",
    "1",
    "--rounds",
    "2",
    "--seconds",
    "0",
    "--no-straggler",
    "--link-rates",
]
LIMIT_S = 60
pytestmark = pytest.mark.release


def namespaces_of(pid: int) -> list[str]:
    return [name for name in existing_namespaces() if name.startswith(f"tbnet-{pid}-")]


def pids_inside(namespace: str) -> list[int]:
    listed = programs.run(["ip", "netns", "pids", namespace], check=False)
    return [int(pid) for pid in listed.stdout.split()]


def wait_until(condition: Callable[[], Any], awaited: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for: {awaited}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def _emulation() -> None:
    if reason := why_unavailable():
        pytest.skip(f"cannot emulate a network: {reason}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start network.py with the given arguments; after the test, end processes that still run, first by SIGTERM."""
    with ExitStack() as stack:

        def start_benchmark(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(BENCHMARKS / "network.py"), *SMALL, "--json", str(tmp_path / "r.json")]
            pipe = subprocess.PIPE
            process = stack.enter_context(
                programs.started([*command, *arguments], env=os.environ | environment, stdout=pipe, stderr=pipe)
            )
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


def rank_pids(benchmark: subprocess.Popen[str]) -> list[int]:
    """Return the processes of both ranks, once they run in their namespaces."""

    def both() -> list[int]:
        pids = [pids_inside(f"tbnet-{benchmark.pid}-rank{rank}") for rank in range(2)]
        return [pid for inside in pids for pid in inside] if all(pids) else []

    found: list[int] = wait_until(both, "ranks in their namespaces")
    return found


def assert_nothing_left(benchmark: subprocess.Popen[str], ranks: list[int]) -> None:
    assert namespaces_of(benchmark.pid) == []
    assert [pid for pid in ranks if is_alive(pid)] == []


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.usefixtures("_emulation")
def test_shaped_network_is_as_slow_as_it_should_be(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
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
@pytest.mark.network
@pytest.mark.usefixtures("_emulation")
def test_idle_processors_wait_for_the_given_time(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    only = ("--only", "bytegrad", "four_bits_feedback", "qadam", "decentralized", "async")
    benchmark = start("--compute", "idle", "--compute-ms", "100", "--rates", "50mbit", *only)
    output, errors = benchmark.communicate(timeout=2 * LIMIT_S)
    assert benchmark.returncode == 0, errors
    assert "CPUs idle while gradients are computed" in output
    [network] = json.loads((tmp_path / "r.json").read_text())["networks"]
    assert max(network["schedule"]["ready_s"]) == pytest.approx(0.1)
    rows = {row["contestant"]: row for row in network["rows"]}
    assert rows["compute"]["step_ms"] > 100
    # All gradients are in one bucket, which is ready after 100 ms, and takes 87 ms.
    assert rows["bytegrad"]["schedule_floor_ms"] == pytest.approx(187, rel=0.03)
    # 80 KiB of its 0.5 MB pass unshaped.
    assert rows["bytegrad"]["step_ms"] > 0.9 * rows["bytegrad"]["schedule_floor_ms"]
    for name in ("decentralized", "async"):
        assert rows[name]["schedule_floor_ms"] == rows[name]["floor_ms"]


@pytest.mark.network
@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_leaves_nothing(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    benchmark = start("--rates", "1mbit", "--only", "ddp")
    ranks = rank_pids(benchmark)
    benchmark.send_signal(number)
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == 128 + number
    assert f"stopped by {number.name}" in errors
    assert_nothing_left(benchmark, ranks)


@pytest.mark.network
@pytest.mark.usefixtures("_emulation")
def test_dead_rank_ends_its_network(start: Callable[..., subprocess.Popen[str]]) -> None:
    benchmark = start("--rates", "1mbit", "--only", "ddp")
    ranks = rank_pids(benchmark)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == 1
    assert "1mbit: rank 1 ended with -9" in errors
    assert_nothing_left(benchmark, ranks)


@pytest.mark.network
@pytest.mark.usefixtures("_emulation")
def test_killed_benchmark_is_cleaned_up_by_the_next(start: Callable[..., subprocess.Popen[str]]) -> None:
    benchmark = start("--rates", "1mbit", "--only", "ddp")
    ranks = rank_pids(benchmark)
    left = set(namespaces_of(benchmark.pid))
    benchmark.kill()
    benchmark.communicate(timeout=LIMIT_S)
    assert len(left) == 3  # the switch and two ranks
    wait_until(lambda: not any(map(is_alive, ranks)), "ranks end with their parent")
    assert left <= set(remove_stale_namespaces())
    assert_nothing_left(benchmark, ranks)


@pytest.mark.alone
def test_without_the_tools_it_reports_that_and_runs_over_loopback(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    benchmark = start("--rates", "50mbit", "--only", "ddp", "bf16", PATH=str(tmp_path))
    output, errors = benchmark.communicate(timeout=2 * LIMIT_S)
    assert benchmark.returncode == 0, errors
    assert "No emulated network: " in output
    assert "Not measured: 50mbit" in output
    assert "| DDP bf16 hook |" in output


def test_sharded_contestants_refuse_to_idle(start: Callable[..., subprocess.Popen[str]]) -> None:
    benchmark = start("--compute", "idle", "--only", "fsdp")
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == 2
    assert "--compute idle: FSDP2 and HSDP" in errors


def test_unknown_rate_is_refused(start: Callable[..., subprocess.Popen[str]]) -> None:
    benchmark = start("--rates", "fast")
    _, errors = benchmark.communicate(timeout=LIMIT_S)
    assert benchmark.returncode == 2
    assert "--rates" in errors
    assert "'fast'" in errors


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("network-*.json")), ids=lambda path: path.stem)
def test_recorded_results_can_be_shown(path: Path) -> None:
    shown = warm_python.run([str(BENCHMARKS / "network.py"), "--show", str(path)])
    assert shown.stdout.count("| compute only |") == len(json.loads(path.read_text())["networks"])
