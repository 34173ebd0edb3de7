"""The results of the demo: a comparison of two runs as a table, as JSON and as a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from torchbagua._environment import environment
from torchbagua._text_table import table
from torchbagua.cli.demo.train import Run, Settings, num_final_steps

LOSS_TOLERANCE = 0.01
"""The largest relative difference between ByteGrad's and plain DDP's loss that the project promises."""


@dataclass(frozen=True)
class Comparison:
    """The two runs of the demo."""

    plain: Run
    bytegrad: Run

    @property
    def loss_difference(self) -> float:
        """The relative difference of ByteGrad's final loss from plain DDP's."""
        return abs(self.bytegrad.final_loss / self.plain.final_loss - 1)

    @property
    def losses_agree(self) -> bool:
        return self.loss_difference < LOSS_TOLERANCE


def describe(comparison: Comparison) -> str:
    """Returns the comparison as text: a table with one row per run, and the meaning of the columns."""
    head = [
        ["", "final loss", "MB sent", "ratio", "ms", "bits per"],
        ["", "nats/byte", "per step", "", "per step", "element"],
    ]
    rows = [
        [
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.step_sent_bytes / 1e6:.3f}",
            f"{run.ratio:.2f}x",
            f"{run.step_ms:.0f}",
            f"{run.bits_per_element:.2f}",
        ]
        for run in (comparison.plain, comparison.bytegrad)
    ]
    plain = comparison.plain
    num_final = num_final_steps(len(plain.losses))
    verdict = "less than" if comparison.losses_agree else "NOT less than"
    return f"""\
{table([*head, *rows], num_head_rows=len(head), gap=3)}

The losses differ by {comparison.loss_difference:.2%}, {verdict} {LOSS_TOLERANCE:.0%}.

Loss: mean over the last {num_final} steps and over all ranks. ms: median, on one machine without a network.
MB: sent by each rank for {plain.num_elements:,} gradient elements. torchbagua.observe.Recorder measures
ByteGrad's bytes. Plain DDP's bytes are the volume of gloo's ring all-reduce, 2 (n-1)/n x 4 bytes x elements
for n ranks; `make bench-network` verifies this volume at the network interface."""


def write(comparison: Comparison, settings: Settings, folder: Path) -> list[Path]:
    """Writes `results.json` and `loss.png` into `folder` and returns their paths."""
    results, picture = folder / "results.json", folder / "loss.png"
    document = {
        "environment": environment(),
        "settings": asdict(settings),
        "loss_difference": comparison.loss_difference,
        "loss_tolerance": LOSS_TOLERANCE,
        "runs": [asdict(comparison.plain), asdict(comparison.bytegrad)],
    }
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _draw(comparison, settings).savefig(picture)
    return [results, picture]


def _draw(comparison: Comparison, settings: Settings) -> Figure:
    """Draws both loss curves over the bytes that each rank has sent."""
    plain, bytegrad = comparison.plain, comparison.bytegrad
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for run, colour, side in ((plain, "dimgray", "right"), (bytegrad, "tab:blue", "center")):
        sent_mb = [sent_bytes / 1e6 for sent_bytes in run.sent_bytes]
        smooth = _smooth(run.losses, len(run.losses) // 50)
        axes.plot(sent_mb, run.losses, color=colour, alpha=0.25, linewidth=0.7)
        axes.plot(sent_mb, smooth, color=colour, linewidth=2)
        axes.plot(sent_mb[-1], smooth[-1], "o", color=colour)
        axes.annotate(
            f"{run.name}\nloss {run.final_loss:.3f}, {sent_mb[-1]:,.0f} MB",
            (sent_mb[-1], smooth[-1]),
            xytext=(0, -28),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="top",
            color=colour,
            backgroundcolor="white",
            weight="bold",
        )
    difference = f"the losses differ by {comparison.loss_difference:.2%}"
    figure.suptitle(f"{bytegrad.name} sends {bytegrad.ratio:.2f} times fewer bytes; {difference}", weight="bold")
    axes.set_title(
        f"GPT of {plain.num_elements / 1e6:.2f} M parameters on the sources of Python's standard library, "
        f"{settings.nproc} ranks, {settings.steps} steps",
        fontsize="medium",
    )
    axes.set_xlabel("gradient bytes sent by each rank (MB)")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Returns the mean of each value and up to `reach` adjacent values on either side."""
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
