"""Trains what the rows of the horizon benchmark lack, in batches that train together."""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from convergence_sweep import TUNING_SEED, Record, save
from convergence_tasks import SEQUENCES_PER_RANK
from horizon_optimizers import newton_schulz_flops
from horizon_rows import ROWS, Trial, is_current, missing_trials
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from processes import Limits, Stopped

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
        for record in filter(is_current, self._document["trainings"]):
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
        by_replica = model.step_flops(ROWS[row].sequences) + newton_schulz_flops(model) * ROWS[row].inner.startswith(
            "muon"
        )
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
