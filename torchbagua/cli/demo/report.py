"""The results of the demo: a comparison of two runs as a table and as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

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
    def speed_up(self) -> float:
        return self.plain.step_ms / self.bytegrad.step_ms

    @property
    def losses_agree(self) -> bool:
        return self.loss_difference < LOSS_TOLERANCE


def describe(comparison: Comparison, settings: Settings) -> str:
    """Returns the comparison as text: a table with one row per run, the results, and the meaning of the columns."""
    plain, bytegrad = comparison.plain, comparison.bytegrad
    head = [
        ["", "final loss", "MB sent", "ratio", "ms", "floor", "bits per"],
        ["", "nats/byte", "per step", "", "per step", "ms", "element"],
    ]
    rows = [
        [
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.step_sent_bytes / 1e6:.3f}",
            f"{run.ratio:.2f}x",
            f"{run.step_ms:.0f}",
            f"{run.step_sent_bytes * 8 / settings.rate_mbit / 1e3:.0f}" if settings.rate_mbit else "-",
            f"{run.bits_per_element:.2f}",
        ]
        for run in (plain, bytegrad)
    ]
    faster, network = "", "over loopback"
    if settings.rate_mbit:
        faster = f", and its steps are {comparison.speed_up:.1f} times faster at {settings.rate_mbit} Mbit/s"
        network = "that emulates the network"
    num_final = num_final_steps(len(plain.losses))
    verdict = "less than" if comparison.losses_agree else "NOT less than"
    return f"""\
{table([*head, *rows], num_head_rows=len(head), gap=3)}

ByteGrad sends {bytegrad.ratio:.2f} times fewer bytes{faster}.
The losses differ by {comparison.loss_difference:.2%}, {verdict} {LOSS_TOLERANCE:.0%}.

Loss: mean over the last {num_final} steps and over all ranks. ms: median, on one machine {network}. floor: the time to
send the bytes at the rate of the network.
MB: sent by each rank for {plain.num_elements:,} gradient elements. torchbagua.observe.Recorder measures
ByteGrad's bytes. Plain DDP's bytes are the volume of gloo's ring all-reduce, 2 (n-1)/n x 4 bytes x elements
for n ranks; `make bench-network` verifies this volume at the network interface."""


def write(comparison: Comparison, settings: Settings, folder: Path) -> Path:
    """Writes `results.json` into `folder` and returns its path."""
    results = folder / "results.json"
    document = {
        "environment": environment(),
        "settings": asdict(settings),
        "loss_difference": comparison.loss_difference,
        "loss_tolerance": LOSS_TOLERANCE,
        "runs": [asdict(comparison.plain), asdict(comparison.bytegrad)],
    }
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return results
