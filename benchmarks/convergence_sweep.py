"""Selects the next training of the convergence benchmark, and reads and writes the file from which it continues.

A learning rate is the task's rate times RATE_FACTOR to the power of an integer, its rung. All contestants try the same
rungs with a seed that is not reported. If the best is at an edge, the grid grows there. The best rung is then trained
with the reported seeds.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_contestants import CONTESTANTS
from convergence_tasks import TASKS

RATE_FACTOR = 1.8
MOST_RUNGS = 10  # a grid does not grow beyond this
TUNING_SEED = 1000

Record = dict[str, Any]  # a finished training
Document = dict[str, Any]  # the contents of a file: "settings", "environments" and "trainings"


@dataclass(frozen=True)
class Trial:
    """One training."""

    task: str
    contestant: str
    rung: int
    seed: int

    @property
    def rate(self) -> float:
        return TASKS[self.task].rate * RATE_FACTOR**self.rung


@dataclass(frozen=True)
class Sweep:
    """All trainings to run.

    Attributes:
        tasks, contestants: their names, in the order in which they are trained.
        rungs: the rungs that all contestants try; None: those of each task.
        grows: whether grids grow.
        seeds: the reported seeds.
    """

    tasks: Sequence[str]
    contestants: Sequence[str]
    rungs: Sequence[int] | None
    grows: bool
    seeds: Sequence[int]

    def next_trial(self, records: Sequence[Record]) -> Trial | None:
        """Return the first training that `records` does not contain."""
        return next((trials[0] for trials in self._missing(records) if trials), None)

    def cost(self, records: Sequence[Record], steps: Mapping[str, int]) -> int:
        """Return the cost of all missing trainings that are known so far; see `trial_cost`."""
        return sum(trial_cost(trial, steps) for trials in self._missing(records) for trial in trials)

    def _missing(self, records: Sequence[Record]) -> Iterable[list[Trial]]:
        for task in self.tasks:
            for contestant in self.contestants:
                if task in CONTESTANTS[contestant].tasks:
                    yield self._missing_of(task, contestant, of(records, task, contestant))

    def _missing_of(self, task: str, contestant: str, records: Sequence[Record]) -> list[Trial]:
        tuned = tuning_losses(records)
        rungs = [rung for rung in (TASKS[task].rungs if self.rungs is None else self.rungs) if rung not in tuned]
        if not rungs and self.grows:
            rungs = grow_grid(tuned)
        best = best_rung(tuned)
        if not rungs and best is None:
            return []  # the contestant diverges at every rate
        done = {record["seed"] for record in records if not rungs and record["rung"] == best}
        seeds = [seed for seed in self.seeds if seed not in done]
        # While rungs are missing, the rung of the reported seeds is unknown.
        return [Trial(task, contestant, rung, TUNING_SEED) for rung in rungs] + [
            Trial(task, contestant, best or 0, seed) for seed in seeds
        ]


def trial_cost(trial: Trial, steps: Mapping[str, int]) -> int:
    """Return the number of steps; the steps of slow tasks count several times."""
    return steps[trial.task] * TASKS[trial.task].step_cost


def of(records: Iterable[Record], task: str, contestant: str) -> list[Record]:
    return [record for record in records if (record["task"], record["contestant"]) == (task, contestant)]


def held_out_loss(record: Record) -> float:
    """Return the final loss; infinite if the training has diverged."""
    loss = record["held_out_losses"][-1]
    return math.inf if loss is None else float(loss)


def tuning_losses(records: Iterable[Record]) -> dict[int, float]:
    """Return the losses of one contestant and task with the tuning seed, by rung."""
    return {record["rung"]: held_out_loss(record) for record in records if record["seed"] == TUNING_SEED}


def best_rung(losses: Mapping[int, float]) -> int | None:
    """Return the rung with the lowest loss; None if all have diverged."""
    best = min(losses, key=losses.__getitem__, default=None)
    return best if best is not None and losses[best] < math.inf else None


def grow_grid(losses: Mapping[int, float]) -> list[int]:
    """Return the rung beyond the edge if the best rung is at an edge; if all have diverged, the rung below."""
    best = best_rung(losses)
    if len(losses) >= MOST_RUNGS:
        return []
    if best is None or best == min(losses):
        return [min(losses) - 1]
    return [max(losses) + 1] if best == max(losses) else []


def load(path: Path, settings: Mapping[str, Any], steps: Mapping[str, int]) -> tuple[Document, list[str]]:
    """Return the document in `path`, if it exists, and the contestants that have changed since.

    The document does not contain the trainings of changed contestants.

    Raises:
        ValueError: the file was written with other settings; names them.
    """
    if not path.exists():
        return {"settings": settings, "environments": [], "trainings": []}, []
    document = json.loads(path.read_text())
    before = document["settings"]
    differences = [
        f"{name}={before.get(name)!r} in the file, {settings.get(name)!r} now"
        for name in sorted(before.keys() | settings.keys())
        if before.get(name) != settings.get(name)
    ]
    if differences:
        raise ValueError(f"{path} has other settings: {'; '.join(differences)}; pass another file with --json")
    changed = {
        (record["task"], record["contestant"])
        for record in document["trainings"]
        if record["contestant"] in CONTESTANTS and _settings_of(record) != _settings_now(record, steps)
    }
    document["trainings"] = [
        record for record in document["trainings"] if (record["task"], record["contestant"]) not in changed
    ]
    return document, [f"{contestant} on {task}" for task, contestant in sorted(changed)]


def _settings_of(record: Record) -> str:
    """Return the recorded settings in today's form: codecs by name, and the all-reduce in rank order."""
    settings: str = record["settings"]
    settings = settings.replace(
        "(hierarchical=False, average=True)", "(hierarchical=False, average=True, in_rank_order=True)"
    )
    return settings.replace("'MinMaxUInt4'", "'minmax_uint4'").replace("'MinMaxUInt8'", "'minmax_uint8'")


def _settings_now(record: Record, steps: Mapping[str, int]) -> str:
    contestant = CONTESTANTS[record["contestant"]]
    return contestant.describe(contestant.warmup_steps(steps[record["task"]]))


def save(path: Path, document: Document) -> None:
    """Replace the file atomically: a process that is killed meanwhile leaves the previous version."""
    written = path.with_suffix(".new")
    written.write_text(json.dumps(document) + "\n")
    written.replace(path)
