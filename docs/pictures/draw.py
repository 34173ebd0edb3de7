"""Draws the pictures of the tutorials' pages, from the output that the pages show.

    python docs/pictures/draw.py

The others are made elsewhere: timeline.png by `torchbagua trace draw` (tutorial 05), tensorboard.png by
`TORCHBAGUA_PICTURES=docs/pictures make test-browser`, convergence-*.png by `make bench-convergence`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = Path(__file__).parent
# Okabe and Ito's, which people who cannot tell red from green can tell apart; the first is for what DDP does.
COLOURS = ("#999999", "#0072b2", "#e69f00", "#009e73")


def output_of(page: str) -> str:
    """What stands first in a block of text of a tutorial's page."""
    text = (PICTURES.parent / "tutorials" / f"{page}.md").read_text("utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]


def rows_of(output: str, *names: str) -> dict[str, list[float]]:
    """The numbers of the last line that begins with each name."""
    lines = {name: re.findall(rf"^{name}\b(.*\d.*)$", output, re.MULTILINE)[-1] for name in names}
    return {name: [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for name, line in lines.items()}


def steps_of(output: str, what: str, *names: str) -> dict[str, list[tuple[int, float]]]:
    """The lines about steps below the line that is each name: step, and the number behind `what`."""
    parts = {name: output.split(f"{name}\n", 1)[1] for name in names}
    blocks = {name: re.match(r"(?:  step.*\n)*", part)[0] for name, part in parts.items()}
    pattern = rf"step +(\d+):.*{what} +([\d.]+)"
    return {n: [(int(step), float(one)) for step, one in re.findall(pattern, block)] for n, block in blocks.items()}


def panels(*titles: str) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(3.6 * len(titles), 2.8), dpi=150, layout="constrained")
    all_axes = figure.subplots(1, len(titles))
    for axes, title in zip(all_axes, titles, strict=True):
        axes.set_title(title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def curves(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for (name, points), colour, width in zip(lines.items(), COLOURS, (5, 2, 2, 2), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylim(0, 1.1 * max(value for points in lines.values() for _, value in points))
    axes.legend(frameon=False)


def bars(axes: Axes, names: Sequence[str], values: Mapping[str, Sequence[float]], form: str) -> None:
    """One bar for each name; or several, one for each key of `values`."""
    width = 0.8 / len(values)
    for index, (label, heights) in enumerate(values.items()):
        colours = COLOURS[: len(names)] if len(values) == 1 else COLOURS[index]
        places = [place + width * (index - (len(values) - 1) / 2) for place in range(len(names))]
        drawn = axes.bar(places, heights, 0.95 * width, color=colours, label=label)
        axes.bar_label(drawn, fmt=form, padding=2, fontsize="small")
    axes.set_xticks(range(len(names)), names, fontsize="small")
    axes.margins(y=0.2 if len(values) == 1 else 0.45)
    if len(values) > 1:
        axes.legend(frameon=False, loc="upper right")


def your_own_loop() -> Figure:
    output, names = output_of("00_your_own_loop"), ("plain DDP", "8-bit gradients")
    rows = rows_of(output, *names)
    figure, (loss, size, time) = panels("held-out loss", "MB sent, a step and rank", "ms a step, over 1 Gbit/s")
    curves(loss, steps_of(output, "held-out loss", *names))
    bars(size, names, {"": [row[1] for row in rows.values()]}, "%.2f")
    bars(time, names, {"": [row[2] for row in rows.values()]}, "%.0f")
    return figure


def ddp_to_bytegrad() -> Figure:
    output, names = output_of("01_ddp_to_bytegrad"), ("plain DDP", "ByteGrad")
    figure, (loss, size) = panels("loss of a batch, nats a byte", "MB sent by each rank")
    curves(loss, steps_of(output, "loss", *names))
    bars(size, names, {"": [row[1] for row in rows_of(output, *names).values()]}, "%.1f")
    return figure


def decentralized() -> Figure:
    rows = rows_of(output_of("02_decentralized"), "DDP", "all", "shift_one", "low precision")
    figure, (apart, size) = panels("how far the farthest rank is from the mean", "kB sent, a step and rank")
    steps = (15, 30, 45, 60, 75, 90, 93)
    curves(apart, {name: list(zip(steps, row[1:8], strict=True)) for name, row in rows.items()})
    apart.set_ylim(top=2 * max(max(row[1:8]) for row in rows.values()))
    apart.set_xlabel("step; the last points are after detaching")
    bars(size, list(rows), {"": [row[0] for row in rows.values()]}, "%.0f")
    return figure


def async_on_a_slow_network() -> Figure:
    names, cases = ("DDP", "async"), ("ranks alike", "rank 1 slow")
    rows = rows_of(output_of("03_async_on_a_slow_network"), *(f"{name}, {case}" for case in cases for name in names))
    figure, both = panels(*(f"steps a second over 100 Mbit/s, {case}" for case in cases))
    for axes, case in zip(both, cases, strict=True):
        of_ranks = {f"rank {rank}": [rows[f"{name}, {case}"][rank] for name in names] for rank in (0, 1)}
        bars(axes, names, of_ranks, "%.1f")
    return figure


def qadam() -> Figure:
    rows = rows_of(output_of("04_qadam"), "Adam", "QAdam", "1 bit")
    names = ("Adam", "QAdam, 8 bits", "QAdam, 1 bit")
    figure, (size, loss) = panels("kB sent, a step and rank", "loss at the end, nats a byte")
    parts = {part: [row[index] for row in rows.values()] for index, part in enumerate(("in the warm-up", "after it"))}
    bars(size, names, parts, "%.0f")
    bars(loss, names, {"": [row[2] for row in rows.values()]}, "%.3f")
    return figure


def over_bytes_and_seconds(page: str, where: str, *names: str) -> Figure:
    """Held-out loss over what was sent, and over the time until then, on the network that `where` names."""
    output = output_of(page)
    loss = steps_of(output, "loss", *names)
    figure, both = panels("held-out loss over bytes", f"held-out loss over time, {where}")
    for axes, (what, label) in zip(both, {"sent": "MB sent by a rank", "after": "seconds"}.items(), strict=True):
        costs = steps_of(output, what, *names)
        pairs = {name: zip(costs[name], loss[name], strict=True) for name in names}
        curves(axes, {name: [(cost, value) for (_, cost), (_, value) in pairs[name]] for name in names})
        axes.set_xlabel(label)
        axes.set_xscale("log")
        axes.set_ylim(bottom=1.9)
    return figure


def diloco() -> Figure:
    return over_bytes_and_seconds("07_diloco", "20 Mbit/s a rank", "DDP", "DiLoCo", "local SGD")


def fsdp() -> Figure:
    names = "float32", "8-bit gradients", "8-bit weights too"
    return over_bytes_and_seconds("08_fsdp", "200 Mbit/s a rank", *names)


def muon_diloco() -> Figure:
    output, names = output_of("09_muon_diloco"), ("DDP, AdamW", "DDP, Muon", "DiLoCo, AdamW", "DiLoCo, Muon")
    loss, sent = (steps_of(output, what, *names) for what in ("loss", "sent"))
    figure, (over_steps, over_bytes) = panels("held-out loss over steps", "held-out loss over bytes")
    curves(over_steps, loss)
    curves(
        over_bytes,
        {name: [(mb, value) for (_, mb), (_, value) in zip(sent[name], loss[name], strict=True)] for name in names},
    )
    over_bytes.set_xlabel("MB sent by a rank")
    over_bytes.set_xscale("log")
    over_bytes.get_legend().remove()  # the same as in the other panel
    for axes in (over_steps, over_bytes):
        axes.set_ylim(bottom=2)
    return figure


def elastic() -> Figure:
    output = output_of("10_elastic")
    events = [float(second) for second in re.findall(r"([\d.]+) s: generation [12]", output)]
    rows = re.findall(r"([\d.]+) s: step.*loss ([\d.]+), +([\d.]+) steps/s", output)
    seconds, losses, speeds = ([float(value) for value in column] for column in zip(*rows, strict=True))
    figure, both = panels("held-out loss", "steps a second")
    for axes, values in zip(both, (losses, speeds), strict=True):
        axes.plot(seconds, values, color=COLOURS[1], linewidth=2, marker="o", markersize=3)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)
        for second, colour, text in zip(events, COLOURS[2:], ("three train on", "a rank has joined"), strict=True):
            axes.axvline(second, color=colour, linestyle="--", label=text)
    both[0].legend(frameon=False, loc="lower right")
    return figure


DRAWN = (
    your_own_loop,
    ddp_to_bytegrad,
    decentralized,
    async_on_a_slow_network,
    qadam,
    diloco,
    fsdp,
    muon_diloco,
    elastic,
)

if __name__ == "__main__":
    for draw in DRAWN:
        draw().savefig(PICTURES / f"{draw.__name__}.png")
