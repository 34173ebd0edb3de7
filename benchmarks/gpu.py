"""Runs everything that needs an NVIDIA GPU, in ten minutes: builds, tests, sanitizers and benchmarks.

    PYTHONPATH=. python benchmarks/gpu.py [--deadline 560] [--only build tests ...]

Prints one table and writes one JSON file. Uses the current Python and its packages (torch with CUDA, pytest,
hypothesis, numpy; nvcc for the libraries), installs nothing and needs no network: libraries are built in place. A step
that fails or times out is reported, and the other steps still run; the exit status is then 1. A figure that misses its
target is marked in the table and does not change the exit status.

The JSON file is written to benchmarks/results, the output of the steps to runs/. If OUT is set, both are also written
there. `--trial` runs the same steps on the CPU, with tiny sizes, to try out this program.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

import codec
import nccl_overhead
from environment import REPOSITORY, RESULTS, dated, gpu_record, write_record
from table import table
from torchbagua._environment import usable_cores

PATHS = ("aot", "jit", "nvrtc")
SANITIZER = "compute-sanitizer"
GRACE_S = 5.0  # from the interrupt of a step to its end
LEAST_TIME_S = 5  # a step does not start with less time left
# Instead of the options in pyproject.toml, which exclude the GPU tests and reject settings of newer pytest versions.
PYTEST = ("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider")
SANITIZED = ("tests/test_native_kernels.py",)
# Of one bucket, and of a rank's chunk of it among eight ranks.
SIZES = {"bucket": 6_553_600, "chunk": 819_200}


@dataclass(frozen=True)
class Step:
    """A program to run for at most `limit_s`. Skipped if the program `needs` is not on PATH."""

    name: str
    command: Sequence[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)  # added to this process's environment
    needs: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step."""

    step: str
    result: str  # passed, failed, timed out, skipped or not run
    seconds: float
    detail: str  # the last line that the step printed, or the reason why it did not run

    @property
    def is_good(self) -> bool:
        return self.result in ("passed", "skipped")


def steps(scratch: Path, logs: Path, *, is_trial: bool) -> list[Step]:
    """Return all steps in order; the longest and least informative are last.

    They write results to `scratch`, and a trace to `logs`.
    """
    python = sys.executable
    marked = "not gpu and not soak and not browser" if is_trial else "gpu"
    tests = [*SANITIZED, "-k", "same_bytes"] if is_trial else ["tests"]
    small = ["--device", "cpu", "--rounds", "1"] if is_trial else ["--device", "cuda"]
    tiny_tensor = ["--num-elements", "100000"] if is_trial else []
    tiny_model = ["--small", "--batch", "2"] if is_trial else []
    test = [
        python,
        *PYTEST,
        "-m",
        marked,
        "-rs",
        "-v",
        "--tb=short",
        "--durations=10",
        "-o",
        "faulthandler_timeout=100",  # the longest test waits 80 s for torch's watchdog
        "--continue-on-collection-errors",
        *tests,
    ]
    if importlib.util.find_spec("xdist") is not None:
        test += [f"--numprocesses={min(12, usable_cores())}", "--dist=worksteal"]
    trace = ["--trace", f"{logs}/step.json.gz"]
    overhead = [
        python,
        "benchmarks/nccl_overhead.py",
        "--json",
        f"{scratch}/overhead.json",
        *trace,
        *small,
        *tiny_model,
    ]
    # Checking torch's kernels too would take far too long.
    sanitized = ["--kernel-name", "kernel_substring=torchbagua", "--report-api-errors", "no", "--error-exitcode", "86"]
    sanitized += [python, *PYTEST, "-m", marked]
    sanitized += ["-k", "same_bytes", *SANITIZED]

    def codec_step(path: str, size: str = "") -> Step:
        """Return the step that times the codecs of a path, on tensors of one of SIZES, or on the benchmark's own."""
        name = f"codec {path} {size}".strip()
        elements = tiny_tensor or (["--num-elements", str(SIZES[size])] if size else [])
        command = [python, "benchmarks/codec.py", "--json", f"{scratch}/{name}.json", *small, *elements]
        limit_s = 150 if path == "jit" else 60  # the first use compiles
        return Step(name, command, limit_s, {"TORCHBAGUA_NATIVE": path})

    # Every tensor has a separate allocation, so that an access beyond its end hits no other tensor.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        Step("build", [python, "setup.py", "build_ext", "--inplace"], 200),
        Step("doctor", [python, "-m", "torchbagua.cli", "doctor"], 60),
        Step("tests", test, 200),
        codec_step("aot"),
        *(codec_step("aot", name) for name in SIZES),
        Step("overhead", overhead, 90),
        *(
            Step(f"sanitizer {tool}", [SANITIZER, "--tool", tool, *sanitized], 90, alone, needs=SANITIZER)
            for tool in ("memcheck", "racecheck", "synccheck")
        ),
        codec_step("nvrtc"),
        codec_step("jit"),
    ]


def results_of(scratch: Path) -> dict[str, Any]:
    """Return the results that the steps have written so far; None for each missing result."""

    def read(name: str) -> Any:
        path = scratch / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    names = [*PATHS, *(f"aot {size}" for size in SIZES)]
    return {"codec": {name: read(f"codec {name}") for name in names}, "overhead": read("overhead")}


def run(step: Step, log: IO[bytes], left_s: float) -> Outcome:
    """Run a step with its output in `log`. On a timeout, interrupt it, and soon kill it and its children."""
    if step.needs is not None and shutil.which(step.needs) is None:
        return Outcome(step.name, "skipped", 0.0, f"{step.needs} is not on PATH")
    if left_s < LEAST_TIME_S:
        return Outcome(step.name, "not run", 0.0, "no time left (--deadline)")
    limit_s = min(step.limit_s, left_s)
    log.write(f"\n======== {step.name}: {' '.join(step.command)}\n".encode())
    log.flush()
    begin = log.tell()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | step.environment
    start_s = time.monotonic()
    process = subprocess.Popen(
        step.command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    said = None
    try:
        status: int | None = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        status, said = None, last_line(log, begin)
        process.send_signal(signal.SIGINT)  # pytest then reports the failures so far
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    finally:
        # Even if the process has ended: ranks that it started may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start_s
    said = said or last_line(log, begin)
    if status is None:
        return Outcome(step.name, "timed out", seconds, f"after {limit_s:.0f} s; last: {said}")
    if status != 0:
        return Outcome(step.name, "failed", seconds, f"exit status {status}; last: {said}")
    return Outcome(step.name, "passed", seconds, said)


def last_line(log: IO[bytes], begin: int) -> str:
    """Return the last line of `log` after the position `begin`."""
    log.seek(begin)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip(" =")]
    return lines[-1].strip(" =")[:160] if lines else "it printed nothing"


def report(record: dict[str, Any]) -> str:
    """Return all tables."""
    outcomes = [
        [step["step"], step["result"], f"{step['seconds']:.0f}", step["detail"].replace("|", "/")]
        for step in record["steps"]
    ]
    parts = [table(["step", "result", "s", ""], outcomes)]
    for name, found in record["codec"].items():
        if found is not None:
            title = f"{name}, {found['num_elements']} elements: {codec.launches_line(found['launch_us'])}"
            parts.append(f"{title}\n\n{codec.table_of(found['results'])}")
    if record["overhead"] is not None:
        parts.append(nccl_overhead.table_of(record["overhead"]))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=560.0, help="seconds for all steps")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run the steps with names that begin with these")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, on the CPU")
    arguments = parser.parse_args()
    if not arguments.trial and not torch.cuda.is_available():
        sys.exit(f"this torch ({torch.__version__}, of {sys.executable}) cannot use a GPU")
    start_s = time.monotonic()
    name = dated("gpu")
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    results = REPOSITORY / "runs" if arguments.trial else RESULTS  # a trial does not produce results
    logs = out or REPOSITORY / "runs"
    logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"steps": []}
    if torch.cuda.is_available():
        record["gpu"] = gpu_record()
    with tempfile.TemporaryDirectory() as folder, open(logs / f"{name}.log", "w+b") as log:
        prefixes = tuple(arguments.only or [""])
        planned = [
            step for step in steps(Path(folder), logs, is_trial=arguments.trial) if step.name.startswith(prefixes)
        ]
        if not planned:
            sys.exit(f"--only {' '.join(arguments.only)}: no step has such a name")
        for step in planned:
            outcome = run(step, log, arguments.deadline - (time.monotonic() - start_s))
            print(f"{step.name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
            record["steps"].append({**asdict(outcome), "is_good": outcome.is_good})
            record |= results_of(Path(folder))
            # Written after every step: if the program ends early, only the remaining steps are lost.
            for to in filter(None, (results, out)):
                write_record(to / f"{name}.json", record)

    print(f"\n{report(record)}\n\n{name}.json, {name}.log")
    sys.exit(0 if all(step["is_good"] for step in record["steps"]) else 1)


if __name__ == "__main__":
    main()
