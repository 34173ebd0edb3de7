"""The results of the demo as a picture. Needs matplotlib."""

import statistics
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchbagua.cli.demo.report import Comparison
from torchbagua.cli.demo.train import Run, Settings


def draw(comparison: Comparison, settings: Settings) -> Figure:
    """Draws both loss curves over the bytes that each rank has sent and, on an emulated network, over time."""
    plain, bytegrad = comparison.plain, comparison.bytegrad
    panels = [("gradient bytes sent by each rank (MB)", "MB", _sent_mb(plain), _sent_mb(bytegrad))]
    result = f"{bytegrad.name} sends {bytegrad.ratio:.2f} times fewer bytes"
    if settings.rate_mbit:
        panels.append((f"time at {settings.rate_mbit} Mbit/s (s)", "s", plain.seconds, bytegrad.seconds))
        result += f", and its steps are {comparison.speed_up:.1f} times faster"
    figure = Figure(figsize=(4.5 + 3.5 * len(panels), 4.5), dpi=150, layout="constrained")
    figure.suptitle(f"{result}; the losses differ by {comparison.loss_difference:.2%}", weight="bold")
    figure.supxlabel(
        f"GPT of {plain.num_elements / 1e6:.2f} M parameters on the sources of Python's standard library, "
        f"{settings.nproc} ranks, {settings.steps} steps",
        fontsize="medium",
    )
    subplots = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, unit, plain_x, bytegrad_x) in zip(subplots, panels, strict=True):
        # One label above its curve and the other below, so that they do not overlap.
        _draw_loss(axes, plain, plain_x, unit, color="dimgray", offset=(10, 14), alignment=("right", "bottom"))
        _draw_loss(axes, bytegrad, bytegrad_x, unit, color="tab:blue", offset=(0, -14), alignment=("center", "top"))
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    subplots[0].set_ylabel("training loss (nats per byte)")
    return figure


def _sent_mb(run: Run) -> list[float]:
    return [sent_bytes / 1e6 for sent_bytes in run.sent_bytes]


def _draw_loss(
    axes: Axes,
    run: Run,
    x: Sequence[float],
    unit: str,
    *,
    color: str,
    offset: tuple[float, float],
    alignment: tuple[Literal["right", "center"], Literal["top", "bottom"]],
) -> None:
    smooth = _smooth(run.losses, len(run.losses) // 25)
    axes.plot(x, run.losses, color=color, alpha=0.25, linewidth=0.7)
    axes.plot(x, smooth, color=color, linewidth=2)
    axes.plot(x[-1], smooth[-1], "o", color=color)
    horizontal, vertical = alignment
    axes.annotate(
        f"{run.name}\nloss {run.final_loss:.3f}, {x[-1]:,.0f} {unit}",
        (x[-1], smooth[-1]),
        xytext=offset,
        textcoords="offset points",
        horizontalalignment=horizontal,
        verticalalignment=vertical,
        color=color,
        weight="bold",
    )


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Returns the mean of each value and up to `reach` adjacent values on either side."""
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
