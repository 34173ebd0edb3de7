"""Draws charts of measured figures for light and for dark pages. The same figures give the same bytes of SVG."""

import io
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import Bbox

from contestants import BASELINE, COMPUTE_ONLY
from convergence_report import Row as Trained
from convergence_report import Section
from figure_tables import FLAT_NETWORKS, network_name, times
from released import Figures, Network, Number, Row


@dataclass(frozen=True)
class Theme:
    """The colours of a page. The groups are distinguishable with every kind of colour vision, after Okabe and Ito."""

    text: str
    line: str
    torch: str
    equal: str
    different: str


THEMES = {
    "light": Theme(text="#1f2328", line="#d0d4da", torch="#6e7781", equal="#0072b2", different="#c05000"),
    "dark": Theme(text="#e6edf3", line="#444c56", torch="#9aa4af", equal="#56b4e9", different="#e69f00"),
}
# The names of the groups of contestants in legends, by the colour of the theme.
GROUPS = {"torch": "torch alone", "equal": "torchbagua, equal weights", "different": "torchbagua, weights averaged"}
AVERAGES_WEIGHTS = ("decentralized", "shift_one", "low_precision", "async")
# In charts of times; of contestants that differ little, only one is shown.
OF_TORCH = (BASELINE, "bf16", "powersgd", COMPUTE_ONLY)
COMPARED = (
    *("gradient_allreduce", "bf16", "powersgd", "low_rank", "bytegrad", "four_bits", "one_bit_feedback", "topk"),
    *("qadam", "qadam_1bit", *AVERAGES_WEIGHTS),
)
# In charts of losses, in which contestants have other names.
TRAINED_OF_TORCH = ("bf16", "powersgd_hook")
TRAINED = (
    *("gradient_allreduce", "bf16", "powersgd_hook", "bytegrad", "4bits", "topk", "powersgd", "qadam", "qadam_1bit"),
    *AVERAGES_WEIGHTS,
)
WIDTH = 8.2  # inches, so that letters are nearly as large as those of the page
LARGEST_LOSS_PERCENT = 8  # larger losses are named at the edge


def group_of(contestant: str, of_torch: Sequence[str] = OF_TORCH) -> str:
    return "torch" if contestant in of_torch else "different" if contestant in AVERAGES_WEIGHTS else "equal"


def to_svg(figure: Figure) -> bytes:
    """Return the figure as SVG, without a date and with deterministic names."""
    written = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchbagua", "svg.fonttype": "path"}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(written, metadata=metadata)  # type: ignore[no-untyped-call]
    return b"\n".join(line.rstrip() for line in written.getvalue().splitlines()) + b"\n"


def _panels(theme: Theme, titles: Sequence[str], size: tuple[float, float], *, share_x: bool = False) -> list[Axes]:
    """Panels side by side on one figure, without a background."""
    figure = Figure(figsize=size, dpi=72, layout="constrained", facecolor="none")
    panels = list(figure.subplots(1, len(titles), squeeze=False, sharey=True, sharex=share_x)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left", color=theme.text)
        axes.set_facecolor("none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(theme.line)
        axes.tick_params(colors=theme.text, labelsize=9, length=0)
    return panels


def _add_legend(figure: Figure, theme: Theme, groups: Sequence[str], others: Mapping[str, Line2D]) -> None:
    handles = [Patch(color=getattr(theme, group), label=GROUPS[group]) for group in GROUPS if group in groups]
    for label, handle in others.items():
        handle.set_label(label)
        handles.append(handle)  # type: ignore[arg-type]  # a legend takes any artist
    style = {"fontsize": 9, "frameon": False, "labelcolor": theme.text, "columnspacing": 1.2, "handlelength": 1.4}
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **style)


def _rows(network: Network, order: Sequence[str], theme: Theme, axes: Axes) -> Iterator[tuple[int, str, Row]]:
    """Order the rows of a panel, the first at the top; yield the place, colour and row of each measured contestant."""
    axes.set_ylim(len(order) - 0.4, -0.6)
    for place, name in enumerate(order):
        if name in network.rows:
            yield place, getattr(theme, group_of(name)), network.rows[name]


def _measured(figures: Figures, number: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the measured networks of one node, and the contestants sorted by `number` on the first network."""
    titles = [title for title in FLAT_NETWORKS if title in figures.networks]
    rows = figures.networks[titles[0]].rows
    present = [name for name in names if name in rows]
    return titles, sorted(present, key=lambda name: -rows[name].numbers[number].median)


def _add_range(axes: Axes, place: float, number: Number, theme: Theme) -> None:
    if number.smallest < number.largest:
        axes.plot([number.smallest, number.largest], [place, place], color=theme.text, linewidth=1.2)


def draw_speedups(figures: Figures, theme: Theme) -> Figure:
    """Speed-up over DDP in float32: a panel for each network, a bar for each contestant."""
    titles, order = _measured(figures, "speedup", COMPARED)
    panels = _panels(theme, list(map(network_name, titles)), (WIDTH, 0.27 * len(order) + 1.3), share_x=True)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log")
        for place, colour, row in _rows(figures.networks[title], order, theme, axes):
            speedup = row.numbers["speedup"]
            # The bar starts at 1, DDP's speed-up: the bar of a slower contestant extends to the left.
            axes.barh(place, speedup.median - 1, left=1, color=colour, height=0.72)
            _add_range(axes, place, speedup, theme)
            axes.annotate(
                times(speedup.median),
                (max(speedup.largest, 1), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=theme.text,
            )
        axes.axvline(1, color=theme.text, linewidth=1)
    largest = max(row.numbers["speedup"].largest for title in titles for row in _of(figures, title, order))
    smallest = min(row.numbers["speedup"].smallest for title in titles for row in _of(figures, title, order))
    panels[0].set_xlim(min(0.75, 0.95 * smallest), 2.2 * largest)
    left, right = panels[0].get_xlim()
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if left <= tick <= right]
    for axes in panels:
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
    panels[0].set_yticks(range(len(order)), _labels(figures, titles, order))
    panels[0].figure.suptitle("Times as fast as DDP in float32", x=0.01, ha="left", fontsize=11, color=theme.text)
    _add_legend(
        panels[0].figure,  # type: ignore[arg-type]  # not a sub-figure
        theme,
        list(map(group_of, order)),
        {"DDP in float32": Line2D([], [], color=theme.text, linewidth=1)},
    )
    return panels[0].figure  # type: ignore[return-value]


def _labels(figures: Figures, titles: Sequence[str], order: Sequence[str]) -> list[str]:
    """Short names. Charts show only one of two contestants that differ only in the suffix removed here."""
    return [re.sub(", (error feedback|one bucket)$", "", row.label) for row in _of(figures, titles[0], order)]


def _of(figures: Figures, title: str, names: Sequence[str]) -> list[Row]:
    return [figures.networks[title].rows[name] for name in names if name in figures.networks[title].rows]


def draw_steps(figures: Figures, theme: Theme) -> Figure:
    """Step time and its floors: a panel for each network, a bar for each contestant."""
    titles, order = _measured(figures, "step_ms", (COMPUTE_ONLY, BASELINE, *COMPARED))
    panels = _panels(theme, list(map(network_name, titles)), (WIDTH, 0.27 * len(order) + 1.4))
    for axes, title in zip(panels, titles, strict=True):
        network = figures.networks[title]
        for place, colour, row in _rows(network, order, theme, axes):
            step_ms = row.numbers["step_ms"]
            axes.barh(place, step_ms.median, color=colour, height=0.72)
            _add_range(axes, place, step_ms, theme)
            label = f"{step_ms.median:.0f}"
            if network.settings["rank_rate"] is not None and row.numbers["floor_ratio"].median != 1:
                label += f", {times(row.numbers['floor_ratio'].median)}x"
                for floor, style in (("floor_ms", "-"), ("schedule_floor_ms", ":")):
                    if floor in row.numbers:
                        where = [row.numbers[floor].median] * 2
                        axes.plot(where, [place - 0.36, place + 0.36], color=theme.text, linewidth=1.8, linestyle=style)
            axes.annotate(
                label,
                (step_ms.largest, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=theme.text,
            )
        axes.set_xlim(0, 1.45 * max(row.numbers["step_ms"].largest for row in _of(figures, title, order)))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.axvline(0, color=theme.line, linewidth=1)
    rows = figures.networks[titles[0]].rows
    panels[0].set_yticks(range(len(order)), _labels(figures, titles, order))
    panels[0].figure.suptitle(
        "Milliseconds of a step, and multiple of its floor", x=0.01, ha="left", fontsize=11, color=theme.text
    )
    floors = {"floor": Line2D([], [], color=theme.text, linewidth=1.8)}
    if any("schedule_floor_ms" in row.numbers for row in rows.values()):
        floors["schedule floor"] = Line2D([], [], color=theme.text, linewidth=1.8, linestyle=":")
    _add_legend(panels[0].figure, theme, list(map(group_of, order)), floors)  # type: ignore[arg-type]
    return panels[0].figure  # type: ignore[return-value]


def draw_losses(sections: Sequence[Section], theme: Theme) -> Figure:
    """Held-out loss compared with plain DDP over the bits sent per element: a panel for each task."""
    panels = _panels(theme, [section["title"] for section in sections], (9, 4.8))
    for axes, section in zip(panels, sections, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.27, 250)
        axes.set_ylim(-2.2, LARGEST_LOSS_PERCENT + 1)
        axes.set_xticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.grid(axis="y", color=theme.line, linewidth=0.6)
        axes.axhline(0, color=theme.text, linewidth=1)
        axes.set_axisbelow(True)
        axes.set_xlabel("bits sent per element; DDP in float32: 32", fontsize=9, color=theme.text)
        points = [_add_trained(axes, row, theme) for row in section["rows"] if row["contestant"] in TRAINED]
        _name_points(axes, points)
    panels[0].set_ylabel("held-out loss vs. DDP, %", fontsize=9, color=theme.text)
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:+.0f}" if value else "0")
    _add_legend(panels[0].figure, theme, list(GROUPS), {})  # type: ignore[arg-type]
    return panels[0].figure  # type: ignore[return-value]


@dataclass(frozen=True)
class _Point:
    """A training in a chart: its coordinates, label and colour."""

    x: float
    y: float
    label: str
    colour: str


def _add_trained(axes: Axes, row: Trained, theme: Theme) -> _Point:
    bits, differences = statistics.fmean(row["bits"]), row["differences_percent"]
    mean, colour = statistics.fmean(differences), getattr(theme, group_of(row["contestant"], TRAINED_OF_TORCH))
    if mean > LARGEST_LOSS_PERCENT:
        axes.plot(bits, LARGEST_LOSS_PERCENT, "^", color=colour, markersize=7)
        return _Point(bits, LARGEST_LOSS_PERCENT, f"{row['label']}: {mean:+.0f} %", colour)
    shown = [min(difference, LARGEST_LOSS_PERCENT) for difference in (min(differences), max(differences))]
    axes.plot([bits, bits], shown, color=colour, linewidth=1.2, alpha=0.6)
    axes.plot(bits, mean, "o", color=colour, markersize=6)
    return _Point(bits, mean, row["label"], colour)


def _name_points(axes: Axes, points: Sequence[_Point]) -> None:
    """Write each name as close to its point as possible without covering a point, a range or another name."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # so that the layout is known
    places = [tuple(place) for place in axes.transData.transform([(point.x, point.y) for point in points])]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    taken += [line.get_window_extent() for line in axes.lines if line.get_linestyle() == "-"]
    for (x, y), point in sorted(zip(places, points, strict=True), key=lambda pair: pair[0]):
        written = axes.text(1, 0, point.label, fontsize=8)
        width, height = written.get_window_extent().size
        written.remove()
        for distance, angle in itertools.product(range(7, 90, 4), range(0, 360, 20)):
            dx, dy = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            share = 0 if dx > 1 else 1 if dx < -1 else 0.5  # of the name is to the left
            box = Bbox.from_bounds(x + dx - share * width, y + dy - height / 2, width, height)
            if all(axes.bbox.contains(*corner) for corner in (box.min, box.max)) and not box.count_overlaps(taken):
                taken.append(box)
                line = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
                axes.annotate(
                    point.label,
                    (point.x, point.y),
                    xytext=(dx, dy),
                    textcoords="offset points",
                    ha="left" if share == 0 else "right" if share == 1 else "center",
                    va="center",
                    fontsize=8,
                    color=point.colour,
                    arrowprops=line if distance > 15 else None,
                )
                break
