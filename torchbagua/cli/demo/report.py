"""What the demo found: the comparison of two runs, as a table, as JSON and as a picture."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from torchbagua.cli.demo.train import Run, Settings
from torchbagua.environment import environment

LOSS_TOLERANCE = 0.01
"""How far ByteGrad's loss may lie from plain DDP's; what the project promises."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One training run over all its ranks; lists have one entry a step."""

    name: str
    num_elements: int
    losses: list[float]  # nats per byte, mean of the ranks
    sent_bytes: list[int]  # per rank since the start, mean of the ranks
    sent_bytes_measured: bool  # else they are the volume of a float32 ring
    final_loss: float  # mean of the last tenth of the steps
    step_sent_bytes: float  # per rank, mean of the steps
    step_ms: float  # median of the steps of rank 0
    bits_per_element: float  # 32 for what a float32 ring sends
    ratio: float  # of the first run's bytes to these


@dataclass(frozen=True)
class Comparison:
    """The runs in order; the first is what the others are measured against."""

    runs: list[Summary]

    @property
    def loss_difference(self) -> float:
        """How far the last run's final loss lies from the first's, as a fraction of it."""
        return abs(self.runs[-1].final_loss / self.runs[0].final_loss - 1)

    @property
    def losses_agree(self) -> bool:
        return self.loss_difference < LOSS_TOLERANCE


def compare(runs_by_rank: Sequence[Mapping[str, Run]]) -> Comparison:
    """Summarises what the ranks returned: for each rank its runs by name."""
    summaries: list[Summary] = []
    for name in runs_by_rank[0]:
        summaries.append(_summarise(name, [runs[name] for runs in runs_by_rank], summaries[:1]))
    return Comparison(summaries)


def _summarise(name: str, ranks: Sequence[Run], baseline: Sequence[Summary]) -> Summary:
    nproc, num_steps, num_elements = len(ranks), len(ranks[0].losses), ranks[0].num_elements
    losses = [statistics.fmean(step) for step in zip(*(run.losses for run in ranks), strict=True)]
    ring_bytes = ring_all_reduce_bytes(num_elements, nproc)
    measured = [run.sent_bytes for run in ranks if run.sent_bytes is not None]
    if measured:
        sent_bytes = [round(statistics.fmean(step)) for step in zip(*measured, strict=True)]
    else:
        sent_bytes = [round(ring_bytes * step) for step in range(1, num_steps + 1)]
    step_sent_bytes = sent_bytes[-1] / num_steps
    return Summary(
        name=name,
        num_elements=num_elements,
        losses=losses,
        sent_bytes=sent_bytes,
        sent_bytes_measured=bool(measured),
        final_loss=statistics.fmean(losses[-max(1, num_steps // 10) :]),
        step_sent_bytes=step_sent_bytes,
        step_ms=statistics.median(ranks[0].step_ms),
        bits_per_element=32 * step_sent_bytes / ring_bytes,
        ratio=baseline[0].step_sent_bytes / step_sent_bytes if baseline else 1.0,
    )


def ring_all_reduce_bytes(num_elements: int, nproc: int) -> float:
    """The payload that each rank sends in a ring all-reduce of float32: 2 (n-1)/n of the tensor."""
    return 2 * (nproc - 1) / nproc * _FLOAT32_BYTES * num_elements


def table(comparison: Comparison) -> str:
    """The comparison as text: one row a run, and what the columns mean."""
    first = comparison.runs[0]
    tail_steps = max(1, len(first.losses) // 10)
    rows = [
        ["", "final loss", "MB sent", "ratio", "ms", "bits per"],
        ["", "nats/byte", "a step", "", "a step", "element"],
    ]
    rows += [
        [
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.step_sent_bytes / 1e6:.3f}",
            f"{run.ratio:.2f}x",
            f"{run.step_ms:.0f}",
            f"{run.bits_per_element:.2f}",
        ]
        for run in comparison.runs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines.insert(2, "-" * len(lines[0]))
    verdict = "less than" if comparison.losses_agree else "NOT less than"
    lines += [
        "",
        f"The losses differ by {comparison.loss_difference:.2%}, {verdict} {LOSS_TOLERANCE:.0%}.",
        "",
        f"Loss: mean of the last {tail_steps} steps and of all ranks. ms: median, on one machine without a network.",
        f"MB: sent by each rank for {first.num_elements:,} gradient elements. ByteGrad's are measured by",
        "torchbagua.traces.Recorder. Plain DDP's are the volume of the ring all-reduce that gloo runs,",
        "2 (n-1)/n x 4 bytes x elements for n ranks; `make bench-network` checks it at the network interface.",
    ]
    return "\n".join(lines)


def write(comparison: Comparison, settings: Settings, folder: Path) -> list[Path]:
    """Writes `results.json` and `loss.png` into `folder` and returns their paths."""
    results, picture = folder / "results.json", folder / "loss.png"
    document = {
        "environment": environment(),
        "settings": asdict(settings),
        "loss_difference": comparison.loss_difference,
        "loss_tolerance": LOSS_TOLERANCE,
        "runs": [asdict(run) for run in comparison.runs],
    }
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _draw(comparison, settings).savefig(picture)
    return [results, picture]


def _draw(comparison: Comparison, settings: Settings) -> Figure:
    """Both loss curves against the bytes that each rank has sent."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for run, colour in zip(comparison.runs, ("dimgray", "tab:blue"), strict=True):
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
            horizontalalignment="right" if run is comparison.runs[0] else "center",
            verticalalignment="top",
            color=colour,
            backgroundcolor="white",
            weight="bold",
        )
    last = comparison.runs[-1]
    figure.suptitle(
        f"{last.name} sends {last.ratio:.2f} times fewer bytes; the losses differ by {comparison.loss_difference:.2%}",
        weight="bold",
    )
    axes.set_title(
        f"GPT of {last.num_elements / 1e6:.2f} M parameters on the sources of Python's standard library, "
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
    """The mean of each value and up to `reach` neighbours on either side."""
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
