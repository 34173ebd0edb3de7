"""Counts the files and lines of the package that a training executes: `make walk`.

    python docs_build/walk.py [CASE ...] [--files] [--check] [--write]

Each case is a training of real processes over gloo with the native kernels, from `attach` to the end of its block.
Rank 0 runs under a tracer on all of its threads. A line counts once; module and class bodies do not count, since they
run at import. `--write` updates walk.json, whose figures are ceilings that only fall, and the tables of docs/design.md.
"""

import argparse
import inspect
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from markers import fill

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("walk.json")
PAGE = ROOT / "docs" / "design.md"
PROGRAM = "docs_build/walk.py"  # as markers name it
PACKAGE = str(Path(tb.__file__).parent)

# The steady step is the union of the last steps: a round may take two. Lints leave after the first 20.
_NUM_STEPS, _NUM_STEADY_STEPS = 28, 4
_LIMIT_S = 120

# A few lines run or not, by which rank or thread is faster. The record has the most of so many runs.
_NUM_RECORDED_RUNS = 8
_MOST_OVER = 5
# If a training executes less than this part of the record, the record must be lowered.
_LEAST_PART = 0.95

Lines = dict[str, set[int]]


@dataclass(frozen=True)
class Case:
    """A training to count.

    Attributes:
        make: returns an optimizer of these parameters, and the algorithm.
        num_ranks: the number of processes.
        nodes: the node of each rank.
        is_sharded: whether the module is sharded by `fully_shard`, and not wrapped in a DistributedDataParallel.
        pause_s: a wait after each step, in which rounds of a timer take place.
    """

    make: Callable[[list[nn.Parameter]], tuple[torch.optim.Optimizer, tb.Algorithm]]
    num_ranks: int = 2
    nodes: tuple[int, ...] | None = None
    is_sharded: bool = False
    pause_s: float = 0.0


def _with_sgd(algorithm: tb.Algorithm) -> Callable[[list[nn.Parameter]], tuple[torch.optim.Optimizer, tb.Algorithm]]:
    return lambda parameters: (torch.optim.SGD(parameters, lr=1e-3), algorithm)


def _qadam(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, tb.Algorithm]:
    optimizer = tb.QAdamOptimizer(parameters, lr=1e-3, warmup_steps=2)
    return optimizer, tb.QAdamAlgorithm(optimizer)


CASES: dict[str, Case] = {
    "gradient_allreduce": Case(_with_sgd(tb.GradientAllReduceAlgorithm())),
    "bytegrad": Case(_with_sgd(tb.ByteGradAlgorithm())),
    "bytegrad, error feedback": Case(_with_sgd(tb.ByteGradAlgorithm(error_feedback=True))),
    "bytegrad, two nodes": Case(_with_sgd(tb.ByteGradAlgorithm()), num_ranks=4, nodes=(0, 0, 1, 1)),
    "bytegrad, fully_shard": Case(_with_sgd(tb.ByteGradAlgorithm()), is_sharded=True),
    "top_k": Case(_with_sgd(tb.TopKAlgorithm())),
    "power_sgd": Case(_with_sgd(tb.PowerSGDAlgorithm())),
    "qadam": Case(_qadam),
    "decentralized": Case(_with_sgd(tb.DecentralizedAlgorithm())),
    "low_precision_decentralized": Case(_with_sgd(tb.LowPrecisionDecentralizedAlgorithm())),
    "local_sgd": Case(_with_sgd(tb.LocalSGDAlgorithm(2))),
    "diloco": Case(_with_sgd(tb.DiLoCoAlgorithm(2))),
    "async": Case(_with_sgd(tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)), pause_s=0.02),
}


_FSDP2 = ("torchbagua.fsdp",)
_OF_GPUS = ("torchbagua.transport.nccl", "torchbagua.transport.staged", "torchbagua.transport.torch_backend")
_OF_WEIGHTS = ("torchbagua.training.weights", "torchbagua.training.weight_loads")
_OF_TRACES = ("torchbagua.collectives.clock", "torchbagua.collectives.encoding_error")
_UNUSED_BY_GRADIENTS = (*_FSDP2, *_OF_GPUS, *_OF_WEIGHTS, *_OF_TRACES, "torchbagua.training.grad_scaler")

# The modules that a training does not import, since it does not use them, by case.
GUARDS: dict[str, tuple[str, ...]] = {
    "gradient_allreduce": _UNUSED_BY_GRADIENTS,
    "bytegrad": _UNUSED_BY_GRADIENTS,
    "bytegrad, fully_shard": (*_OF_GPUS, *_OF_WEIGHTS, "torchbagua.fsdp.replicas"),
    "decentralized": (*_FSDP2, *_OF_GPUS, "torchbagua.training.lint.unaveraged_gradients"),
}


class LineTracer:
    """Records the executed lines of the package's functions, on all threads that start while it is installed."""

    def __init__(self) -> None:
        self._sets: list[tuple[Lines, int | None]] = []  # with the only thread whose lines are recorded there
        self._is_counted: dict[CodeType, bool] = {}

    def install(self) -> None:
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    @staticmethod
    def remove() -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def record(self, *, only_here: bool = False) -> Lines:
        """Return a dictionary of all lines that are executed from now on, on this thread or on all threads."""
        lines: Lines = defaultdict(set)
        self._sets.append((lines, threading.get_ident() if only_here else None))
        return lines

    def stop(self, lines: Lines) -> Lines:
        """Record no more lines there, and return it."""
        self._sets = [entry for entry in self._sets if entry[0] is not lines]
        return lines

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in self._is_counted:
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            self._is_counted[code] = is_function and code.co_filename.startswith(PACKAGE)
        return self._on_line if self._is_counted[code] else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            for lines, thread in self._sets:
                if thread is None or thread == threading.get_ident():
                    lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._on_line


@dataclass(frozen=True)
class Walk:
    """The executed lines of a training by file: in all, by the thread that calls `attach` in it, and in a steady step.

    Attributes:
        imported: the modules of the package that it has imported.
    """

    all: Mapping[str, Sequence[int]]
    attach: Mapping[str, Sequence[int]]
    steady: Mapping[str, Sequence[int]]
    imported: Sequence[str]

    def figures(self) -> dict[str, int]:
        """Return the numbers of files and lines."""
        parts = {"": self.all, "attach_": self.attach, "steady_": self.steady}
        files = {f"{prefix}files": len(lines) for prefix, lines in parts.items()}
        return files | {f"{prefix}lines": sum(map(len, lines.values())) for prefix, lines in parts.items()}


def _sorted(lines: Lines) -> dict[str, list[int]]:
    return {str(Path(file).relative_to(PACKAGE)): sorted(lines[file]) for file in sorted(lines)}


def train(case: Case, rank: int, folder: Path) -> None:
    """Train on one rank. Rank 0 writes its `Walk` to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=case.num_ranks)
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    if case.is_sharded:
        for layer in module.children():
            fully_shard(layer)
        module = fully_shard(module)
    else:
        module = DistributedDataParallel(module, bucket_cap_mb=0.03)  # several buckets
    parameters = list(module.parameters())
    optimizer, algorithm = case.make(parameters)
    group = None if case.nodes is None else tb.BaguaProcessGroup(dist.group.WORLD, nodes=case.nodes)
    inputs = torch.randn(8, 64)
    tracer = LineTracer()
    executed, in_attach = tracer.record(), tracer.record(only_here=True)
    if rank == 0:
        tracer.install()
    with tb.attach(module, optimizer, algorithm, process_group=group):
        tracer.stop(in_attach)
        for step in range(_NUM_STEPS):
            if step == _NUM_STEPS - _NUM_STEADY_STEPS:
                in_steady = tracer.record()
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
            time.sleep(case.pause_s)
        tracer.stop(in_steady)
    tracer.remove()
    if rank == 0:
        imported = sorted(name for name in sys.modules if name.startswith("torchbagua"))
        walk = {"all": executed, "attach": in_attach, "steady": in_steady}
        found = {name: _sorted(lines) for name, lines in walk.items()} | {"imported": imported}
        (folder / "walk.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def walk(case: Case) -> Walk:
    """Run the training of a case. Raises RuntimeError if a rank fails."""
    # A fork has imported torch already, and has executed no function of the package: each case begins anew.
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = [context.Process(target=train, args=(case, rank, folder)) for rank in range(case.num_ranks)]
        for process in ranks:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        for process in ranks:
            process.join(_LIMIT_S)
        if failed := {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode != 0}:
            raise RuntimeError(f"ranks failed, or did not end within {_LIMIT_S} s: exit codes {failed}")
        return Walk(**json.loads((folder / "walk.json").read_text("utf-8")))


def table(figures: Mapping[str, Mapping[str, int]]) -> str:
    """Return the figures as a Markdown table."""
    rows = [
        "| training | files / lines | `attach` alone | a steady step |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, of_case in figures.items():
        cells = [f"{of_case[f'{part}files']} / {of_case[f'{part}lines']:,}" for part in ("", "attach_", "steady_")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def file_table(walked: Walk) -> str:
    """Return the files of a training as a Markdown table: its packages, from the top down, and their files."""
    folders: dict[str, list[str]] = defaultdict(list)
    for file in walked.all:
        count = len(walked.all[file])
        mark = "**" if file in walked.steady else ""
        folders[str(Path(file).parent)].append(f"{mark}`{Path(file).name}`{mark} {count}")
    rows = ["| folder | files and their executed lines |", "| --- | --- |"]
    rows += [f"| `{folder}/` | {', '.join(files)} |" for folder, files in folders.items()]
    return "\n".join(rows)


def recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded figures by case."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))
    return found


def most(runs: Sequence[Walk]) -> dict[str, int]:
    """Return the largest of each figure."""
    figures = [run.figures() for run in runs]
    return {name: max(of_run[name] for of_run in figures) for name in figures[0]}


def write(runs: Mapping[str, Sequence[Walk]]) -> None:
    """Update the record and the page."""
    figures = {name: most(of_case) for name, of_case in runs.items()}
    RECORD.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    parts: dict[str, Callable[[], str]] = {
        "figures": lambda: f"\n{table(figures)}\n\n",
        "gradient_files": lambda: f"\n{file_table(runs['bytegrad'][0])}\n\n",
        "weight_files": lambda: f"\n{file_table(runs['decentralized'][0])}\n\n",
    }
    PAGE.write_text(fill(PAGE.read_text("utf-8"), PROGRAM, parts), "utf-8")


def problems(name: str, walked: Walk) -> list[str]:
    """Compare the figures of a training with the record, and its imports with `GUARDS`."""
    figures, ceilings = walked.figures(), recorded()[name]
    unused = [module for module in walked.imported if module.startswith(GUARDS.get(name, ()))]
    found = [
        f"{name}: {figure.replace('_', ' ')}: {count}, and the record allows {ceilings[figure]}; execute less, or say "
        "why in the commit: make walk ARGS=--write"
        for figure, count in figures.items()
        if count > ceilings[figure] + _MOST_OVER * figure.endswith("lines")
    ]
    if (lines := figures["lines"]) < _LEAST_PART * ceilings["lines"]:
        found.append(f"{name}: {lines} lines: lower the record of {ceilings['lines']}: make walk ARGS=--write")
    return found + [f"{name}: imports {module}, which it does not use" for module in unused]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default, all: {'; '.join(CASES)}")
    parser.add_argument("--files", action="store_true", help="list the files with their executed lines")
    parser.add_argument("--check", action="store_true", help="fail if a figure is above the record")
    parser.add_argument("--write", action="store_true", help="update the record and docs/design.md; needs all cases")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"CASE must be one of {', '.join(map(repr, CASES))}, got {', '.join(sorted(unknown))}")
    if arguments.cases and arguments.write:
        parser.error("--write needs all cases, got some")
    runs: dict[str, list[Walk]] = {}
    names = arguments.cases or list(CASES)
    for number, name in enumerate(names, 1):
        print(f"\r{number} of {len(names)}: {name:40}", end="", file=sys.stderr, flush=True)
        runs[name] = [walk(CASES[name]) for _ in range(_NUM_RECORDED_RUNS if arguments.write else 1)]
    print("\r" + " " * 60, end="\r", file=sys.stderr)
    print(table({name: most(of_case) for name, of_case in runs.items()}))
    if arguments.files:
        for name, of_case in runs.items():
            print(f"\n{name}\n\n{file_table(of_case[0])}")
    if arguments.write:
        write(runs)
    if arguments.check:
        found = [problem for name, of_case in runs.items() for problem in problems(name, of_case[0])]
        print(*found, sep="\n", file=sys.stderr)
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
