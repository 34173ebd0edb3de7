"""Compares methods of data-parallel training over thousands of steps, each at its own best learning rate.

    python benchmarks/horizon.py                   # hours on two cores; continues where it was stopped
    python benchmarks/horizon.py --device cuda     # minutes on one H100
    python benchmarks/horizon.py --quick           # a minute
    python benchmarks/horizon.py --selftest --plan --device cuda    # CUDA graph against eager steps, time of a step
    python benchmarks/horizon.py --show            # only the table of the stored results

One process trains many models with four workers each; see horizon_training.py. horizon_rows.py lists the rows and
chooses their trainings. Each finished training is stored in a JSON file, from which the same command continues. The
mean of the workers' weights is evaluated on held-out data. horizon_ranks.py checks rows against separate processes that
train with torch's optimizers and the package's algorithms.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from convergence_sweep import RATE_FACTOR, TUNING_SEED, save
from convergence_tasks import HELD_OUT_SEQUENCES, SEQUENCES_PER_RANK
from environment import RESULTS, note_environment
from horizon_model import StackedGPT
from horizon_optimizers import newton_schulz_flops
from horizon_report import outer_table, rows_table
from horizon_rows import MIDDLE_RATES, ROWS, RUNGS, SETS, Record, Trial, missing_trials
from horizon_selftest import selftest
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from processes import Limits, Stopped
from torchbagua.cli.demo.text import read_standard_library

QUICK_STEPS = 32
QUICK_HELD_OUT = 32
DEFAULT_BATCH = {"cpu": 5, "cuda": 40}
ASSUMED_FLOPS = {"cpu": 9e10, "cuda": 1.2e13}  # of two cores, and of an H100; for the plan
CHECK_STEPS = 50  # between two checks of the deadline

Key = tuple[str, int, float]  # inner optimizer, sequences and share of the steps: equal in a batch


class TooLong(Exception):
    """A batch of trainings does not end before the deadline."""


class Run:
    """Trains everything that is missing in the file."""

    def __init__(self, arguments: argparse.Namespace, task: Task, document: dict[str, Any], limits: Limits) -> None:
        self._arguments, self._task, self._document, self._limits = arguments, task, document, limits
        self._device = torch.cuda.get_device_name() if task.train.device.type == "cuda" else "cpu"
        self._batch: int = arguments.batch
        self._num_steps: int = arguments.steps

    def _by_row(self) -> dict[str, list[Record]]:
        by_row = defaultdict(list)
        for record in self._document["trainings"]:
            by_row[record["contestant"]].append(record)
        return by_row

    def _steps(self, row: str) -> int:
        return round(self._num_steps * ROWS[row].steps_share)

    def _ready(self) -> dict[Key, list[Trial]]:
        """Return the trainings that can begin now."""
        ready: dict[Key, list[Trial]] = defaultdict(list)
        by_row = self._by_row()
        for name in self._arguments.rows:
            row = ROWS[name]
            trials = missing_trials(name, by_row, self._arguments.rungs, not self._arguments.quick)
            ready[row.inner, row.sequences, row.steps_share] += trials
        return {key: trials for key, trials in ready.items() if trials}

    def _expected(self) -> Iterator[tuple[str, int]]:
        """Yield the number of trainings that each row lacks, if its grid does not grow."""
        by_row = self._by_row()
        for name in self._arguments.rows:
            trials = missing_trials(name, by_row, self._arguments.rungs, False)
            count = len(trials)
            if ROWS[name].rate_of:
                count = 0 if by_row.get(name) else 1
            elif trials and trials[0].seed == TUNING_SEED:  # then the other seeds follow
                count += len(ROWS[name].seeds) - 1
            if count:
                yield name, count

    def flops(self, row: str) -> float:
        """Return the operations of one training."""
        model = self._task.model
        by_replica = model.step_flops(ROWS[row].sequences) + newton_schulz_flops(model) * (ROWS[row].inner == "muon")
        return NUM_WORKERS * self._steps(row) * by_replica

    def print_plan(self) -> None:
        expected = dict(self._expected())
        for name, count in expected.items():
            print(
                f"  {count:3} x {name}: {ROWS[name].label}, {self._steps(name)} steps, {self.flops(name):.2g} FLOP each"
            )
        flops = sum(count * self.flops(name) for name, count in expected.items())
        speed = ASSUMED_FLOPS[self._task.train.device.type]
        print(
            f"{sum(expected.values())} trainings, and more if grids grow: {flops:.3g} FLOP, "
            f"{flops / speed / 60:.1f} minutes at the assumed {speed:.1g} FLOP/s, {self._batch} trainings at a time",
            flush=True,
        )

    def _next_batch(self) -> list[Trial]:
        """Return the largest batch of trainings that can train together."""
        best: list[Trial] = []
        for (_, sequences, _), trials in self._ready().items():
            limit = max(1, self._batch * SEQUENCES_PER_RANK // sequences)
            if min(len(trials), limit) > len(best):
                best = trials[:limit]
        return best

    def run(self) -> None:
        """Train until nothing is missing. Raises Stopped."""
        with tqdm(unit=" training steps", unit_scale=True, smoothing=0.1, mininterval=1) as bar:
            while trials := self._next_batch():
                bar.total = bar.n + sum(count * self._steps(name) for name, count in self._expected())
                done_before = bar.n
                try:
                    records = self._train(trials, bar)
                except TooLong:
                    bar.n = done_before
                    if len(trials) == 1:
                        raise Stopped("the deadline: no training fits before it") from None
                    self._batch = max(1, len(trials) // 2)
                    continue
                bar.n = done_before + len(trials) * self._steps(trials[0].row)
                bar.refresh()
                self._document["trainings"] += records
                save(self._arguments.json, self._document)

    def _train(self, trials: Sequence[Trial], bar: "tqdm[Any]") -> list[Record]:
        first = ROWS[trials[0].row]
        num_steps = self._steps(trials[0].row)
        by_row = [(name, list(group)) for name, group in groupby(trials, key=lambda trial: trial.row)]
        groups = [
            Group(ROWS[name].method(), [Setup(trial.seed, trial.rate) for trial in group]) for name, group in by_row
        ]
        start_s = time.monotonic()
        trainings = Trainings(self._task, first.inner, groups, first.sequences, num_steps)
        bar.set_postfix_str(f"{len(trials)} of {first.inner}{', graph' * trainings.is_captured}")
        begin_s = time.monotonic()

        def on_step(step: int) -> None:
            if step % CHECK_STEPS:
                return
            if self._task.train.device.type == "cuda":
                torch.cuda.synchronize()
            self._limits.check()
            bar.update(CHECK_STEPS * len(trials))
            now_s = time.monotonic()
            left_s = (now_s - begin_s) / step * (num_steps - step)
            if now_s + left_s > self._limits.start + self._limits.deadline_s:
                raise TooLong

        trainings.run(on_step)
        seconds = time.monotonic() - start_s
        losses = torch.stack(trainings.losses, dim=1)
        methods = [(name, group.method) for (name, members), group in zip(by_row, groups, strict=True) for _ in members]
        return [
            {
                "task": "horizon",
                "contestant": name,
                "label": ROWS[name].label,
                "settings": ROWS[name].settings(),
                "rung": trial.rung,
                "rate": trial.rate,
                "seed": trial.seed,
                "steps": num_steps,
                **until_divergence(trainings.evaluated_steps, losses[index]),
                "sent_bytes_a_step": method.bytes_a_step(),
                "num_elements": self._task.model.num_elements,
                "device": self._device,
                "seconds": seconds / len(trials),  # a share of the batch's time
            }
            for index, (trial, (name, method)) in enumerate(zip(trials, methods, strict=True))
        ]


def until_divergence(steps: Sequence[int], losses: Tensor) -> Record:
    """Return the evaluated steps and their losses up to the first that is not finite, which becomes None."""
    finite = [loss if math.isfinite(loss) else None for loss in losses.tolist()]
    count = finite.index(None) + 1 if None in finite else len(finite)
    return {"evaluated_steps": list(steps[:count]), "held_out_losses": finite[:count]}


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the document in `path`, without the trainings of rows that have changed.

    Raises:
        ValueError: the file was written with other settings.
    """
    if not path.exists():
        return {"settings": settings, "environments": [], "trainings": []}
    document: dict[str, Any] = json.loads(path.read_text())
    if document["settings"] != settings:
        raise ValueError(f"{path} has other settings, {document['settings']}, not {settings}; pass another --json")
    trainings = document["trainings"]
    document["trainings"] = [
        record
        for record in trainings
        if record["contestant"] not in ROWS or record["settings"] == ROWS[record["contestant"]].settings()
    ]
    if len(document["trainings"]) < len(trainings):
        print(f"{len(trainings) - len(document['trainings'])} trainings of changed rows are repeated.")
    return document


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=SETS, metavar="ROW", default=["main"], help="or main, more, outer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, help="trainings at a time (default 5, or 40 on a GPU)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rungs", type=int, nargs="+", default=list(RUNGS), help=f"powers of {RATE_FACTOR} to try")
    parser.add_argument("--text", type=Path, help="file to train on (default: Python's standard library)")
    parser.add_argument("--tf32", action="store_true", help="multiply float32 matrices in TF32")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds until the run stops (default: none)")
    parser.add_argument("--json", type=Path, help="file of results (default benchmarks/results/horizon[-quick].json)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one rate, a separate file")
    parser.add_argument("--selftest", action="store_true", help="first compare graph, eager and CPU, and time steps")
    parser.add_argument("--plan", action="store_true", help="only print what is missing")
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--picture", type=Path, help="with --show: also draw the chosen rows into this file")
    arguments = parser.parse_args()
    arguments.rows = list(dict.fromkeys(name for choice in arguments.rows for name in SETS[choice]))
    needed = {ROWS[name].rate_of for name in arguments.rows} - {None, *arguments.rows}
    arguments.rows = [*(name for name in ROWS if name in needed), *arguments.rows]  # rows whose best rate is used
    arguments.batch = arguments.batch or DEFAULT_BATCH[arguments.device]
    if arguments.quick:
        arguments.steps, arguments.rungs = QUICK_STEPS, [0]
    if arguments.json is None:
        arguments.json = RESULTS / f"horizon{'-quick' * arguments.quick}.json"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    return arguments


def load_text(path: Path | None) -> Tensor:
    return (
        read_standard_library() if path is None else torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    )


def main() -> int:
    arguments = parse_arguments()
    if arguments.show:
        document = json.loads(arguments.json.read_text())
        print(f"{rows_table(document)}\n\n{outer_table(document)}")
        if arguments.picture:
            from horizon_picture import draw  # matplotlib is not installed on every machine that trains

            draw(document, arguments.rows).savefig(arguments.picture)
        return 0
    if arguments.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    limits = Limits(arguments.deadline)
    text = load_text(arguments.text)
    model = StackedGPT(arguments.width, arguments.layers)
    num_held_out = QUICK_HELD_OUT if arguments.quick else HELD_OUT_SEQUENCES
    task = Task.from_text(model, text, torch.device(arguments.device), num_held_out)
    # After a failure, training starts nevertheless: the printed differences show whether its results are usable.
    is_right = not arguments.selftest or selftest(task, arguments.batch)
    settings = {
        "workers": NUM_WORKERS,
        "width": arguments.width,
        "layers": arguments.layers,
        "steps": arguments.steps,
        "held-out sequences": num_held_out,
        "text": f"{len(text)} bytes, sha256 {hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]}",
        "tf32": arguments.tf32,
        "middle rates": MIDDLE_RATES,
        "rate factor": RATE_FACTOR,
    }
    try:
        document = load(arguments.json, settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    run = Run(arguments, task, document, limits)
    run.print_plan()
    if arguments.plan:
        return 0 if is_right else 1
    note_environment(document["environments"])
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    save(arguments.json, document)
    try:
        run.run()
    except Stopped as error:
        print(f"stopped by {error}; the same command continues from {arguments.json}.", file=sys.stderr)
        print(f"{rows_table(document)}\n\n{outer_table(document)}")
        return 128 + limits.signal if limits.signal else 1
    print(f"{rows_table(document)}\n\n{outer_table(document)}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
