"""The picture of one training step: the activity of a rank's threads over time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torchbagua.observe.events import CommEvent


class _Style(NamedTuple):
    row: str
    colour: str
    meaning: str
    hatch: str = ""
    alpha: float = 1.0


# Okabe and Ito's palette, which is safe for red-green color blindness; waiting is also hatched. Messages to several
# peers overlap translucently, so the shade shows their number.
_STYLES = {
    "step": _Style("training", "#f0f0f0", "rest of the step: forward, optimizer"),
    "backward": _Style("training", "#bbbbbb", "backward computes"),
    "wait": _Style("training", "#d55e00", "training waits", hatch="////"),
    "apply": _Style("training", "#cc79a7", "averages are written to weights"),
    "encode": _Style("lane", "#0072b2", "encode"),
    "receive": _Style("lane", "#f0e442", "lane waits for a message"),
    "reduce": _Style("lane", "#009e73", "reduce"),
    "decode": _Style("lane", "#56b4e9", "decode"),
    "send": _Style("messages", "#e69f00", "message in flight", alpha=0.6),
}
_ROWS = ("training", "buckets", "lane", "messages")
_BUCKET_COLOURS = ("#e8e8e8", "#d0d0d0")
_ROW_HEIGHT = 0.8
_MOST_LINES = 4


def draw(ranks: Mapping[int, Sequence[CommEvent]]) -> Figure:
    """Draw one step of one or several ranks."""
    steps = {rank: event for rank, events in ranks.items() for event in events if event.phase == "step"}
    origin_ns = min((event.start_ns for event in steps.values()), default=0)
    end_ns = max((event.end_ns for event in steps.values()), default=1)
    # TensorBoard shows the picture of a single rank on a narrow card.
    width, height = (7, 3.6) if len(ranks) == 1 else (10, 1.6 + 1.5 * len(ranks))
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for index, (rank, events) in enumerate(ranks.items()):
        top = index * (len(_ROWS) + 0.5)
        rows = {row: top + number for number, row in enumerate(_ROWS)}
        labels += [(y, row if len(ranks) == 1 else f"rank {rank}: {row}") for row, y in rows.items()]
        _draw_rank(axes, events, rows, origin_ns)
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
    axes.invert_yaxis()
    axes.set_xlim(0, (end_ns - origin_ns) / 1e6)
    axes.set_xlabel("ms since the step began")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(_title(steps), fontsize="medium", weight="bold", x=0.01, ha="left")
    axes.set_title("\n".join(_times(ranks, steps)), fontsize="small", loc="left")
    shown = {event.phase for events in ranks.values() for event in events}
    patches = []
    for phase, style in _STYLES.items():
        if phase in shown:
            edge = "white" if style.hatch else "#999999"
            patches.append(Patch(facecolor=style.colour, hatch=style.hatch, edgecolor=edge, label=style.meaning))
    num_columns = 3 if len(ranks) == 1 else 5
    figure.legend(handles=patches, loc="outside lower center", ncols=num_columns, fontsize="small", frameon=False)
    return figure


def _draw_rank(axes: Axes, events: Sequence[CommEvent], rows: Mapping[str, float], origin_ns: int) -> None:
    def span_ms(event: CommEvent) -> tuple[float, float]:
        return (event.start_ns - origin_ns) / 1e6, event.duration_ns / 1e6

    def extent(row: str) -> tuple[float, float]:
        return rows[row] - _ROW_HEIGHT / 2, _ROW_HEIGHT

    for phase, style in _STYLES.items():
        spans = [span_ms(event) for event in events if event.phase == phase]
        look = {"facecolor": style.colour, "hatch": style.hatch, "alpha": style.alpha}
        axes.broken_barh(spans, extent(style.row), edgecolor="white", lw=0.3, **look)
    buckets = sorted(event for event in events if event.phase == "bucket")
    for number, event in enumerate(buckets):
        start, width = span_ms(event)
        axes.broken_barh([(start, width)], extent("buckets"), facecolor=_BUCKET_COLOURS[number % 2])
        centre = (max(start, 0) + width / 2, rows["buckets"])
        label = event.bucket.split()[-1]
        axes.text(*centre, label, ha="center", va="center", fontsize="x-small", clip_on=True)


def _title(steps: Mapping[int, CommEvent]) -> str:
    for step in steps.values():
        return f"Step {step.step} with {step.algorithm}"
    return "No complete step"


def _times(ranks: Mapping[int, Sequence[CommEvent]], steps: Mapping[int, CommEvent]) -> list[str]:
    """Return a line for each of the first ranks."""
    lines = []
    for rank, step in list(steps.items())[:_MOST_LINES]:
        waited_ns = sum(event.duration_ns for event in ranks[rank] if event.phase == "wait")
        lines.append(f"rank {rank}: {step.duration_ns / 1e6:.1f} ms, {waited_ns / 1e6:.1f} ms of it waiting")
    return lines
