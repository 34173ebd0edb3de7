"""The picture of the horizon benchmark: held-out losses at the best rate, over samples and over bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from convergence_pictures import line_style
from convergence_sweep import TUNING_SEED
from horizon_optimizers import OPTIMIZERS
from horizon_report import REFERENCE, best_records
from horizon_rows import ROWS
from horizon_training import NUM_WORKERS


def draw(document: Mapping[str, Any], names: Sequence[str]) -> Figure:
    """Draw the training of each named row with the tuning seed, at the best rate."""
    figure = Figure(figsize=(8, 4.6), dpi=200, layout="constrained")
    by_samples, by_bytes = figure.subplots(1, 2, sharey=True)
    lines: dict[str, Any] = {}
    finals: list[float] = []
    for name in names:
        record = best_records(document, name).get(TUNING_SEED)
        if record is None or record["held_out_losses"][-1] is None:
            continue
        style = line_style(len(lines), name == REFERENCE)
        # The initial loss would hide the others, and nothing is sent before it.
        steps, losses = record["evaluated_steps"][1:], record["held_out_losses"][1:]
        [line] = by_samples.plot([step * ROWS[name].sequences * NUM_WORKERS for step in steps], losses, **style)
        by_bytes.plot([step * record["sent_bytes_a_step"] for step in steps], losses, **style)
        lines[f"{ROWS[name].label}, {OPTIMIZERS[ROWS[name].inner].label}"] = line
        finals.append(losses[-1])
    if finals:
        by_samples.set_ylim(min(finals) - 0.02, min(finals) + 0.6)
    by_bytes.set_xscale("log")
    by_samples.set_ylabel("held-out loss (nats/byte)")
    for axes, label in ((by_samples, "sequences of all workers"), (by_bytes, "bytes sent by a worker")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure
