"""From the runs of the convergence benchmark to a table for each task and one picture."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from convergence_tasks import TASKS
from table import table

Row = dict[str, Any]  # one contestant of one task; lists have one entry a seed
Section = dict[str, Any]  # one task: what was trained, and its rows

# Okabe and Ito's palette, which is told apart with every kind of colour vision; the baseline is black.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#F0E442")
SMOOTHED_STEPS = 15


def summarise(name: str, runs: Sequence[dict[str, Any]], num_ranks: int) -> Section:
    """The rows of task `name`, in the order of the contestants. Differences are to the first, paired by seed."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run["task"] == name:
            by_label.setdefault(run["contestant"], []).append(run)
    baseline = next(iter(by_label.values()))
    rows = []
    for label, own in by_label.items():
        row: Row = {"contestant": label, "algorithm": own[0]["algorithm"]}
        row |= {
            key: [run[key] for run in own]
            for key in ("seed", "step_sent_bytes", "seconds", "held_out_loss", "held_out_accuracy")
        }
        row["losses"] = [[round(loss, 5) for loss in run["losses"]] for run in own]
        pairs = [(run["held_out_loss"], other["held_out_loss"]) for run, other in zip(own, baseline, strict=True)]
        row["loss_difference_percent"] = [100 * (loss / baseline_loss - 1) for loss, baseline_loss in pairs]
        rows.append(row)
    return {
        "task": name,
        "title": TASKS[name].title,
        "loss_unit": TASKS[name].loss_unit,
        "num_ranks": num_ranks,
        "num_seeds": len(baseline),
        "num_steps": len(baseline[0]["losses"]),
        "rows": rows,
    }


def caption(section: Section) -> str:
    """What was trained, by how many ranks, for how long."""
    return "{title}: {num_ranks} ranks, {num_steps} steps, seeds: {num_seeds}".format_map(section)


def markdown_table(section: Section) -> str:
    """The rows as a Markdown table under the caption: means, and in brackets the smallest and the largest of the seeds.

    MB are 1e6 bytes.
    """
    head = ["gradients or weights by", "MB sent a step and rank", f"held-out loss, {section['loss_unit']}"]
    rows = [
        [
            row["contestant"],
            f"{statistics.fmean(row['step_sent_bytes']) / 1e6:.3f}",
            _spread(row["held_out_loss"], ".4f"),
            _spread(row["loss_difference_percent"], "+.2f") if index > 0 else "",
            _spread([100 * accuracy for accuracy in row["held_out_accuracy"]], ".2f"),
        ]
        for index, row in enumerate(section["rows"])
    ]
    return f"{caption(section)}\n\n{table([*head, 'difference, %', 'held-out accuracy, %'], rows)}"


def _spread(values: Sequence[float], form: str) -> str:
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def draw(sections: Sequence[Section]) -> Figure:
    """Training loss against steps, a panel for each task: the mean of the seeds in a band from smallest to largest."""
    figure = Figure(figsize=(6.5 * len(sections), 5), dpi=150, layout="constrained")
    for axes, section in zip(figure.subplots(1, len(sections), squeeze=False)[0], sections, strict=True):
        # Curves that lie on the baseline would hide it, were it not wider.
        for row, colour in zip(section["rows"], COLOURS[: len(section["rows"])], strict=True):
            width = 3.5 if row is section["rows"][0] else 1.5
            curves = np.array([_smooth(losses) for losses in row["losses"]])
            steps = np.arange(curves.shape[1])
            axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, curves.mean(0), color=colour, linewidth=width, label=row["contestant"])
        axes.set_title(caption(section), fontsize="medium")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(f"training loss, mean of the ranks ({section['loss_unit']})")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def _smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and its neighbours, SMOOTHED_STEPS of them where there are as many on both sides."""
    reach = SMOOTHED_STEPS // 2
    return [statistics.fmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]
