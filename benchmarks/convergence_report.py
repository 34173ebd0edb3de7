"""Summarizes the trainings of the convergence benchmark in a table for each task."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from convergence_contestants import BASELINE
from convergence_sweep import TUNING_SEED, Document, Record, best_rung, held_out_loss, of, tuning_losses
from convergence_tasks import TASKS
from table import table

Row = dict[str, Any]  # one contestant of one task; lists have one entry per seed
Section = dict[str, Any]  # one task: its settings and its rows
Times = Mapping[str, Any]  # the file that convergence_times.py writes


def summarise(name: str, document: Document, times: Times | None) -> Section:
    """Summarize task `name`: a row for each contestant with a reported seed, or that diverges at every rate.

    Differences are to the baseline, paired by seed.
    """
    task, records = TASKS[name], document["trainings"]
    contestants = dict.fromkeys(record["contestant"] for record in records if record["task"] == name)
    num_ranks = document["settings"]["ranks"]
    rows = [_row(of(records, name, contestant), num_ranks) for contestant in contestants]
    rows = [row for row in rows if row["seeds"] or row["rate"] is None]
    baseline = next((row for row in rows if row["contestant"] == BASELINE), None)
    target = statistics.fmean(baseline["losses"]) * (1 + task.target_percent / 100) if baseline else None
    for row in rows:
        by_seed = dict(zip(baseline["seeds"], baseline["losses"], strict=True)) if baseline else {}
        pairs = [(loss, by_seed.get(seed)) for seed, loss in zip(row["seeds"], row["losses"], strict=True)]
        row["differences_percent"] = [100 * (loss / base - 1) for loss, base in pairs if base is not None]
        row["target_steps"] = _steps_to(target, row["curve"]) if target is not None else None
        row["target_seconds"] = {
            rate: _seconds(row, step_ms.get(name, {})) for rate, step_ms in (times["step_ms"] if times else {}).items()
        }
    return {
        "task": name,
        "title": task.title,
        "loss_unit": task.loss_unit,
        "num_ranks": num_ranks,
        "num_steps": document["settings"][f"steps of {name}"],
        "target": target,
        "target_percent": task.target_percent,
        "rows": rows,
    }


def _row(records: Sequence[Record], num_ranks: int) -> Row:
    first, tuned = records[0], tuning_losses(records)
    rung = best_rung(tuned)
    rates = {record["rung"]: record["rate"] for record in records}
    own = [record for record in records if record["rung"] == rung and record["seed"] != TUNING_SEED]
    row: Row = {key: first[key] for key in ("contestant", "label", "settings", "warmup_steps")}
    # A float32 all-reduce sends 2 (n-1)/n of 4 bytes per element.
    all_reduce_bytes = 2 * (num_ranks - 1) / num_ranks * 4 * first["num_elements"]
    return row | {
        "rate": rates[rung] if rung is not None else None,
        "grid": [(rates[rung], loss) for rung, loss in sorted(tuned.items())],
        "is_at_edge": rung in (None, min(tuned, default=None), max(tuned, default=None)),
        "seeds": [record["seed"] for record in own],
        "losses": [held_out_loss(record) for record in own],
        "accuracies": [record["held_out_accuracy"] or 0 for record in own],
        "bits": [32 * (record["sent_bytes_a_step"] or math.nan) / all_reduce_bytes for record in own],
        "steps_a_round": [
            (record["evaluated_steps"][-1] - record["warmup_steps"]) / record["num_rounds"]
            for record in own
            if record["num_rounds"]
        ],
        "curve": _mean_curve(own),
    }


def _mean_curve(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return steps and held-out loss, the mean of the seeds, up to the first divergence."""
    if not records:
        return []
    shortest = min((record["evaluated_steps"] for record in records), key=len)
    losses = zip(*(record["held_out_losses"] for record in records), strict=False)
    means = [statistics.fmean(math.inf if loss is None else loss for loss in values) for values in losses]
    return [point for point in zip(shortest, means, strict=True) if point[1] < math.inf]


def _steps_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the number of steps after which the curve first reaches the target, interpolated linearly; None: never."""
    for (start, before), (end, after) in itertools.pairwise(curve):
        if after <= target:
            return start + (end - start) * max(0.0, before - target) / max(before - after, 1e-12)
    return None


def _seconds(row: Row, step_ms: Mapping[str, Sequence[float]]) -> float | None:
    """Return the seconds to the target, with warm-up steps at the baseline's time; None: never, NaN: not measured."""
    if row["target_steps"] is None:
        return None
    if not {row["contestant"], BASELINE} <= step_ms.keys():
        return math.nan
    own_ms, baseline_ms = (statistics.median(step_ms[name]) for name in (row["contestant"], BASELINE))
    num_warm = min(row["warmup_steps"], row["target_steps"])
    return (num_warm * baseline_ms + (row["target_steps"] - num_warm) * own_ms) / 1e3


def caption(section: Section) -> str:
    """Return the title of the task, the number of ranks and the number of steps."""
    return "{title}: {num_ranks} ranks, {num_steps} steps".format_map(section)


def markdown_table(section: Section) -> str:
    """Return the rows as a Markdown table under the caption: means, with the smallest and largest seed in brackets."""
    rows = section["rows"]
    networks = list(rows[0]["target_seconds"])
    head = ["gradients or weights by", "learning rate (number tried)", "bits per element"]
    head += [f"held-out loss, {section['loss_unit']}", "difference, %", "accuracy, %", "steps to the target"]
    head += [f"seconds to the target, {network}" for network in networks]
    body = [
        [
            row["label"],
            "none" if row["rate"] is None else f"{row['rate']:.3g} ({len(row['grid'])})",
            f"{statistics.fmean(row['bits']):.2f}" if row["bits"] else "",
            _spread(row["losses"], ".4f"),
            _spread(row["differences_percent"], "+.2f") if row["contestant"] != BASELINE else "",
            _spread([100 * accuracy for accuracy in row["accuracies"]], ".2f"),
            _or_never(row["target_steps"]),
            *(_or_never(row["target_seconds"][network]) for network in networks),
        ]
        for row in rows
    ]
    return "\n\n".join([caption(section), table(head, body), *_notes(section)])


def _notes(section: Section) -> list[str]:
    notes = []
    if section["target"] is not None:
        notes.append(
            f"The target is {section['target']:.4f} {section['loss_unit']}, {section['target_percent']} % above the "
            "baseline's final loss. Bits include the warm-up."
        )
    for row in section["rows"]:
        if row["is_at_edge"] and len(row["grid"]) > 1:
            notes.append(f"{row['label']}: the best rate is at the edge of the tried rates.")
        if row["steps_a_round"]:
            notes.append(f"{row['label']}: steps from one round to the next {_spread(row['steps_a_round'], '.1f')}.")
    return notes


def _spread(values: Sequence[float], form: str) -> str:
    if not values or math.inf in values:
        return "diverges"
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def _or_never(value: float | None) -> str:
    return "never" if value is None else "" if math.isnan(value) else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
