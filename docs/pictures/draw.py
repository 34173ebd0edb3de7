"""Draws the pictures of the tutorials' pages, from what the pages show as output.

    python docs/pictures/draw.py

The others are made elsewhere: timeline.png by `torchbagua trace draw` (tutorial 05), tensorboard.png by
`TORCHBAGUA_PICTURES=docs/pictures make test-browser`, convergence-*.png by `make bench-convergence`.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = Path(__file__).parent
TUTORIALS = PICTURES.parent / "tutorials"
# Okabe and Ito's palette, which people who cannot tell red from green can tell apart.
PLAIN, OURS, SECOND, THIRD = "#999999", "#0072b2", "#e69f00", "#009e73"


def outputs_of(page: str) -> list[str]:
    """What stands in the blocks of text of a page."""
    return re.findall(r"^```text\n(.*?)^```$", (TUTORIALS / f"{page}.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


def numbers(pattern: str, text: str) -> list[list[float]]:
    """The groups of every match that are numbers, in order; DOTALL off."""
    rows = re.findall(pattern, text, re.MULTILINE)
    return [[float(one) for one in (row if isinstance(row, tuple) else (row,))] for row in rows]


def panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(4 * count, 3.2), dpi=110, layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, count))


def finish(axes: Axes, title: str, label: str = "") -> None:
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], form: str) -> None:
    axes.bar_label(axes.bar(names, values, color=colours), fmt=form, padding=2)
    axes.margins(y=0.15)


def your_own_loop() -> Figure:
    slow, _ = outputs_of("00_your_own_loop")
    steps = numbers(r"step +(\d+): .*held-out loss ([\d.]+)", slow)
    per_run = 1 + next(i for i, (one, after) in enumerate(itertools.pairwise(steps)) if after < one)
    rows = numbers(r"^(?:plain DDP|8-bit gradients) +([\d.]+) +([\d.]+) +([\d.]+)$", slow)
    figure, (loss, size, time) = panels(3)
    names, colours = ("plain DDP", "8-bit gradients"), (PLAIN, OURS)
    for name, colour, width, run in zip(names, colours, (5, 2), (steps[:per_run], steps[per_run:]), strict=True):
        loss.plot(*zip(*run[:per_run], strict=True), color=colour, linewidth=width, marker="o", label=name)
    loss.legend(frameon=False)
    loss.set_xlabel("step")
    finish(loss, "held-out loss", "nats")
    bars(size, names, [row[1] for row in rows], colours, "%.2f")
    finish(size, "sent by each rank in a step", "MB")
    bars(time, names, [row[2] for row in rows], colours, "%.0f")
    finish(time, "a step over 1 Gbit/s", "ms")
    return figure


def ddp_to_bytegrad() -> Figure:
    (output,) = outputs_of("01_ddp_to_bytegrad")
    steps = numbers(r"step +(\d+): loss ([\d.]+)", output)
    half = len(steps) // 2
    last = numbers(r"^(?:plain DDP|ByteGrad): +loss ([\d.]+), ([\d.]+) MB", output)
    figure, (loss, size) = panels(2)
    names, colours = ("plain DDP", "ByteGrad"), (PLAIN, OURS)
    for index, run in enumerate((steps[:half], steps[half:])):
        points = [*run, [190, last[index][0]]]  # the mean over the last 20 of 200 steps
        loss.plot(
            *zip(*points, strict=True), color=colours[index], linewidth=(5, 2)[index], marker="o", label=names[index]
        )
    loss.legend(frameon=False)
    loss.set_xlabel("step")
    finish(loss, "training loss", "nats a byte")
    bars(size, names, [row[1] for row in last], colours, "%.1f")
    finish(size, "sent by each rank", "MB")
    return figure


def decentralized() -> Figure:
    (output,) = outputs_of("02_decentralized")
    rows = {
        name: [float(number) for number in rest.split()]
        for name, rest in re.findall(r"^(DDP|all|shift_one|low precision) +([\d. ]+)$", output, re.MULTILINE)
    }
    figure, (apart, size) = panels(2)
    colours = dict(zip(rows, (PLAIN, OURS, SECOND, THIRD), strict=True))
    for name, row in rows.items():
        distances = row[1:-1]
        steps = [15 * (index + 1) for index in range(len(distances) - 1)]
        apart.plot([*steps, steps[-1] + 3], distances, color=colours[name], marker="o", label=name)
    apart.legend(frameon=False, loc="upper right")
    apart.set_ylim(top=1.6 * max(max(row[1:-1]) for row in rows.values()))
    apart.set_xlabel("step; the last point is after detaching")
    finish(apart, "distance of the farthest rank from the mean", "of the weights")
    bars(size, list(rows), [row[0] for row in rows.values()], list(colours.values()), "%.0f")
    finish(size, "sent by each rank in a step", "kB")
    return figure


def async_on_a_slow_network() -> Figure:
    figure, both = panels(2)
    titles = ("network of 100 Mbit/s", "network without a limit")
    for axes, output, title in zip(both, outputs_of("03_async_on_a_slow_network"), titles, strict=True):
        rows = re.findall(r"^((?:DDP|async), [a-z1 ]*[a-z]) +([\d.]+) +([\d.]+) +[\d.]+ ", output, re.MULTILINE)
        places = np.arange(len(rows))
        for rank, colour in enumerate((OURS, SECOND)):
            speeds = [float(row[1 + rank]) for row in rows]
            drawn = axes.bar(places + 0.4 * rank - 0.2, speeds, 0.38, color=colour, label=f"rank {rank}")
            axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize="small")
        axes.set_xticks(places, [name.replace(", ", ",\n") for name, *_ in rows], fontsize="small")
        axes.legend(frameon=False)
        axes.margins(y=0.15)
        finish(axes, title, "steps a second")
    return figure


def qadam() -> Figure:
    (output,) = outputs_of("04_qadam")
    rows = re.findall(r"^(Adam|QAdam|1 bit) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    names = [{"Adam": "Adam", "QAdam": "QAdam, 8 bits", "1 bit": "QAdam, 1 bit"}[row[0]] for row in rows]
    figure, (size, loss) = panels(2)
    places = np.arange(len(rows))
    for index, (part, colour) in enumerate((("in the warm-up", PLAIN), ("after it", OURS))):
        drawn = size.bar(
            places + 0.4 * index - 0.2, [float(r[1 + index]) for r in rows], 0.38, color=colour, label=part
        )
        size.bar_label(drawn, fmt="%.0f", padding=2, fontsize="small")
    size.set_xticks(places, names)
    size.set_ylim(top=1.35 * max(float(row[1]) for row in rows))
    size.legend(frameon=False, ncols=2)
    finish(size, "sent by each rank in a step", "kB")
    bars(loss, names, [float(row[3]) for row in rows], (PLAIN, OURS, SECOND), "%.3f")
    finish(loss, "loss at the end", "nats a byte")
    return figure


def main() -> None:
    for draw in (your_own_loop, ddp_to_bytegrad, decentralized, async_on_a_slow_network, qadam):
        draw().savefig(PICTURES / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
