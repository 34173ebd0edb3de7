"""The picture of the convergence benchmark: each task's grid of learning rates, next to its reported trainings."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convergence_contestants import BASELINE
from convergence_report import Section, caption

# Okabe and Ito's palette, which is distinguishable with every kind of colour vision; the baseline is black.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#999999")
DASHES = ("-", "--", ":", "-.")
SHOWN_RANGE = 3  # times the distance of the median loss from the smallest: diverging losses would hide the others


def draw(sections: Sequence[Section]) -> Figure:
    """Draw a row for each task, narrow enough that letters are as large as those of a page."""
    figure = Figure(figsize=(8, 3.4 * len(sections) + 1.4), dpi=200, layout="constrained")
    panels = figure.subplots(len(sections), 2, squeeze=False)
    names = list(dict.fromkeys(row["contestant"] for section in sections for row in section["rows"]))
    labels: dict[str, object] = {}
    for (grid, curves), section in zip(panels, sections, strict=True):
        grid.set_title(caption(section), fontsize="medium", loc="left")
        for row in section["rows"]:
            style = line_style(names.index(row["contestant"]), row["contestant"] == BASELINE)
            [line] = curves.plot(*_columns(row["curve"]), **style)
            grid.plot(*_columns(row["grid"]), marker=".", **style)
            labels.setdefault(row["label"], line)
        _finish(grid, [loss for row in section["rows"] for _, loss in row["grid"]], section["loss_unit"])
        _finish(curves, [loss for row in section["rows"] for _, loss in row["curve"]], section["loss_unit"])
        rates = sorted({rate for row in section["rows"] for rate, _ in row["grid"]})
        grid.set_xscale("log")
        grid.set_xticks(rates, labels=[f"{rate:.2g}" for rate in rates], fontsize="small")
        grid.minorticks_off()
        grid.set_xlabel("peak learning rate")
        curves.set_xlabel("optimizer step, at the best rate")
        if section["target"] is not None:
            curves.axhline(section["target"], color="black", linewidth=0.7)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def line_style(index: int, is_baseline: bool) -> dict[str, Any]:
    """Return matplotlib's arguments for a curve."""
    # The baseline is wider, so that curves on top of it do not hide it.
    if is_baseline:
        return {"color": "#000000", "linewidth": 3.5}
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": 1.3,
    }


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Axes, losses: Sequence[float], unit: str) -> None:
    if finite := list(filter(math.isfinite, losses)):
        lowest = min(finite)
        shown = SHOWN_RANGE * (statistics.median(finite) - lowest) or 1
        axes.set_ylim(lowest - 0.05 * shown, lowest + shown)
    axes.set_ylabel(f"held-out loss ({unit})")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
