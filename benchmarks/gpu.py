"""Everything that needs an NVIDIA GPU, in ten minutes: builds, tests, sanitizers and benchmarks; one table, one JSON.

    python benchmarks/gpu.py [--deadline 560] [--only build tests ...]

Uses this very Python and what is installed for it (torch with CUDA, pytest, hypothesis, numpy; nvcc for the libraries),
installs nothing and needs no network: libraries are built in place. A step that fails or runs out of its time is
reported, and the others run all the same; the exit status is then 1. A figure that misses its target is marked in the
table and changes no exit status.

The JSON goes to benchmarks/results, what the steps have printed to runs/; where OUT is set, both go there as well.
`--trial` goes through the same steps on the CPU, with tiny sizes, to try this program out.
"""

import argparse
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

import codec_gpu
import nccl_overhead
from environment import REPOSITORY, environment_record, gpu_record

PATHS = ("aot", "jit", "nvrtc")
TOOLS = ("memcheck", "racecheck", "synccheck")
LEAST_TIME_S = 5  # with less left a step is not begun
SANITIZER_FOUND = 86
# In place of pyproject.toml's, which leave out the tests of the GPU and are strict about settings of newer pytests.
PYTEST = ("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider")
SANITIZED = ("tests/test_native_kernels.py", "tests/test_native_kernels_minmax_uint8.py")


@dataclass(frozen=True)
class Step:
    """A program to run.

    Attributes:
        limit_s: how long it may take.
        environment: added to this process's own.
        needs: a program that has to be on PATH; without it the step is skipped.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        result: "passed", "failed", "timed out", "skipped" or "not run".
        detail: the last line that it printed, or why it did not run.
    """

    step: str
    result: str
    seconds: float
    detail: str

    @property
    def is_good(self) -> bool:
        return self.result in ("passed", "skipped")


def steps(scratch: Path, *, is_trial: bool) -> list[Step]:
    """All steps in order: what is longest and tells least comes last."""
    python = sys.executable
    marked = "not gpu and not soak and not browser" if is_trial else "gpu"
    tests = ["tests"] if not is_trial else [*SANITIZED, "-k", "same_bytes"]
    tiny = ["--device", "cpu", "--rounds", "1"] if is_trial else []

    def codec(path: str) -> Step:
        command = [python, "benchmarks/codec_gpu.py", "--json", str(scratch / f"codec {path}.json"), *tiny]
        command += ["--num-elements", "100000"] if is_trial else []
        limit_s = 150 if path == "jit" else 60  # at first use it compiles
        return Step(f"codec {path}", command, limit_s, {"TORCHBAGUA_NATIVE": path})

    def sanitizer(tool: str) -> Step:
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
        command += ["--error-exitcode", str(SANITIZER_FOUND), python, *PYTEST, "-m", marked]
        command += ["-k", "same_bytes and not sign_1bit", "--hypothesis-profile=few", *SANITIZED]
        # Every tensor in an allocation of its own, so that what lies beside it is nobody's.
        return Step(f"sanitizer {tool}", command, 90, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "compute-sanitizer")

    overhead = [python, "benchmarks/nccl_overhead.py", "--json", str(scratch / "overhead.json"), *tiny]
    overhead += ["--small", "--batch", "2"] if is_trial else []
    test = [python, *PYTEST, "-m", marked, "-rs", "--durations=10", "--continue-on-collection-errors", *tests]
    return [
        Step("build", [python, "setup.py", "build_ext", "--inplace"], 200),
        Step("doctor", [python, "-m", "torchbagua.cli", "doctor"], 60),
        Step("tests", test, 200),
        *map(codec, PATHS),
        Step("overhead", overhead, 90),
        *map(sanitizer, TOOLS),
    ]


def run(step: Step, log: IO[bytes], left_s: float) -> Outcome:
    """Run a step, with what it prints in `log`; end it with its children where its time is up."""
    if step.needs is not None and shutil.which(step.needs) is None:
        return Outcome(step.name, "skipped", 0.0, f"{step.needs} is not on PATH")
    if left_s < LEAST_TIME_S:
        return Outcome(step.name, "not run", 0.0, "no time is left (--deadline)")
    limit_s = min(step.limit_s, left_s)
    log.write(f"\n======== {step.name}: {' '.join(step.command)}\n".encode())
    log.flush()
    begin = log.tell()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | step.environment
    start_s = time.monotonic()
    process = subprocess.Popen(
        step.command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        status: int | None = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start_s
    said = last_line(Path(log.name), begin)
    log.seek(0, os.SEEK_END)
    if status is None:
        return Outcome(step.name, "timed out", seconds, f"after {limit_s:.0f} s; last: {said}")
    if status != 0:
        return Outcome(step.name, "failed", seconds, f"exit status {status}; last: {said}")
    return Outcome(step.name, "passed", seconds, said)


def last_line(path: Path, begin: int) -> str:
    """The last line that is not empty of what a file holds from `begin` on, shortened."""
    with open(path, "rb") as file:
        file.seek(begin)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip(" =")]
    return lines[-1].strip(" =")[:160] if lines else "it printed nothing"


def read(path: Path) -> Any:
    """What a step has written; None where it has not come to that."""
    return json.loads(path.read_text()) if path.exists() else None


def report(result: dict[str, Any]) -> str:
    """All tables."""
    lines = ["| step | result | s | |", "| --- | --- | ---: | --- |"]
    for one in result["steps"]:
        detail = one["detail"].replace("|", "/")
        lines.append(f"| {one['step']} | {one['result']} | {one['seconds']:.0f} | {detail} |")
    measured = {path: codec for path, codec in result["codec"].items() if codec is not None}
    if measured:
        lines += ["", codec_gpu.table_of([row for codec in measured.values() for row in codec["results"]]), ""]
        for path, codec in measured.items():
            called = ", ".join(f"{name} {us:.1f}" for name, us in codec["launch_us"].items())
            lines.append(f"{path}: microseconds of the host for a call: {called}")
    if result["overhead"] is not None:
        lines += ["", nccl_overhead.table_of(result["overhead"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="the steps whose names begin so")
    parser.add_argument("--trial", action="store_true", help="tiny, on the CPU")
    arguments = parser.parse_args()
    if not arguments.trial and not torch.cuda.is_available():
        sys.exit(f"there is no GPU that this torch ({torch.__version__}, of {sys.executable}) can use")
    start_s = time.monotonic()
    name = f"gpu-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    results = REPOSITORY / ("runs" if arguments.trial else "benchmarks/results")  # a trial's are no results
    logs = out or REPOSITORY / "runs"
    for folder in (results, logs):
        folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, open(logs / f"{name}.log", "w+b") as log:
        scratch = Path(folder)
        planned = steps(scratch, is_trial=arguments.trial)
        if arguments.only is not None:
            planned = [step for step in planned if step.name.startswith(tuple(arguments.only))]
        if not planned:
            sys.exit(f"--only {' '.join(arguments.only)}: there is no such step")
        record: dict[str, Any] = {"environment": environment_record()}
        if torch.cuda.is_available():
            record["gpu"] = gpu_record()
        for step in planned:
            outcomes.append(run(step, log, arguments.deadline - (time.monotonic() - start_s)))
            print(f"{step.name}: {outcomes[-1].result}, {outcomes[-1].seconds:.0f} s", flush=True)
            # Written after every step: what ends this program early then costs the rest only.
            record["steps"] = [asdict(outcome) for outcome in outcomes]
            record["codec"] = {path: read(scratch / f"codec {path}.json") for path in PATHS}
            record["overhead"] = read(scratch / "overhead.json")
            for to in filter(None, (results, out)):
                (to / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    print(f"\n{report(record)}\n\n{name}.json, {name}.log")
    sys.exit(0 if all(outcome.is_good for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
