"""The tables of the horizon benchmark."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from convergence_sweep import Record, best_rung, held_out_loss, tuning_losses
from horizon_optimizers import OPTIMIZERS
from horizon_rows import MAIN, MORE, OUTER, OUTER_STEPS, ROWS, is_current
from table import table

DIVERGED_LOSS = 5.6  # more than the loss of guessing, log 256
REFERENCE = "adamw_ddp"  # each row is also compared with DDP and its own optimizer
HEAD = (
    *("method", "optimizer", "rate", "seeds", "loss, nats per byte"),
    *("vs. DDP and AdamW, %", "vs. DDP and the same optimizer, %", "times fewer bytes than DDP"),
)
# What a reader needs to choose an algorithm: rows, and the code that attaches them.
CHOICES = {
    "adamw_bytegrad": '"bytegrad"',
    "muon_bytegrad": '"bytegrad"',
    "adamw_4bits": "tb.CompressedAllReduceAlgorithm()",
    "muon_4bits_feedback": "tb.CompressedAllReduceAlgorithm(error_feedback=True)",
    "topk_muon_0.05": "tb.TopKAlgorithm(0.05)",
    "topk_sign_0.05": "tb.TopKAlgorithm(0.05)",
    "muon_diloco_10": "tb.DiLoCoAlgorithm(10)",
    "adamw_diloco_10": "tb.DiLoCoAlgorithm(10)",
    "topk_sign_0.02": "tb.TopKAlgorithm(0.02)",
    "topk_sign_0.01": "tb.TopKAlgorithm(0.01)",
    **{
        f"{inner}_diloco_{inner_steps}": f"tb.DiLoCoAlgorithm({inner_steps})"
        for inner_steps in (30, 100)
        for inner in ("muon", "adamw")
    },
}
CHOICES_HEAD = (
    *("times fewer bytes than DDP", "algorithm", "optimizer", "loss vs. DDP and AdamW, %"),
    *("loss vs. DDP and the same optimizer, %", "spread, %", "best learning rate / AdamW's in DDP"),
)


@dataclass(frozen=True)
class Summary:
    """A row's trainings at its best rate.

    Attributes:
        rate: the best rate.
        is_at_edge: whether it is the lowest or the highest that was tried.
        losses: of its seeds.
        over_adamw, over_same: the differences in percent from DDP with AdamW and with the row's inner optimizer, of
            the means over the same seeds; None if there are none.
        rate_factor: the rate divided by the best of DDP with AdamW; None if that was not trained.
        times_fewer: the bytes of a training with DDP divided by the row's; None if DDP was not trained.
    """

    rate: float
    is_at_edge: bool
    losses: tuple[float, ...]
    over_adamw: float | None
    over_same: float | None
    rate_factor: float | None
    times_fewer: float | None

    @property
    def spread(self) -> float:
        """The standard deviation over seeds, of which there are at least two."""
        return statistics.stdev(self.losses)


def summarise_row(document: Mapping[str, Any], name: str) -> Summary | None:
    """Return the summary of a row, or None if it has no trainings."""
    records = best_records(document, name)
    if not records:
        return None
    adamw = best_records(document, REFERENCE)
    same = best_records(document, OPTIMIZERS[ROWS[name].inner].ddp_row)
    first = next(iter(records.values()))
    ddp = next((record for references in (adamw, same) for record in references.values()), None)
    return Summary(
        rate=first["rate"],
        is_at_edge=_is_at_edge(document, name, first),
        losses=tuple(held_out_loss(record) for record in records.values()),
        over_adamw=_difference(records, adamw),
        over_same=_difference(records, same),
        rate_factor=first["rate"] / next(iter(adamw.values()))["rate"] if adamw else None,
        times_fewer=None if ddp is None else _total_bytes(ddp) / _total_bytes(first),
    )


def rows_table(document: Mapping[str, Any], names: Iterable[str] = (*MAIN, *MORE)) -> str:
    """Return a line for each of the rows with finished trainings."""
    lines = []
    for name in names:
        if (summary := summarise_row(document, name)) is None:
            continue
        lines.append([ROWS[name].label, OPTIMIZERS[ROWS[name].inner].label, *_cells(summary)])
    return table(HEAD, lines)


def _cells(summary: Summary) -> list[str]:
    rate = f"{summary.rate:.3g}{' (at the edge)' * summary.is_at_edge}"
    if max(summary.losses) > DIVERGED_LOSS:
        return [rate, str(len(summary.losses)), "diverged", "", "", _times(summary.times_fewer)]
    loss = f"{statistics.fmean(summary.losses):.3f}"
    if len(summary.losses) > 1:
        loss += f" \N{PLUS-MINUS SIGN} {summary.spread:.3f}"
    differences = [_percent(summary.over_adamw), _percent(summary.over_same)]
    return [rate, str(len(summary.losses)), loss, *differences, _times(summary.times_fewer)]


def choices_table(document: Mapping[str, Any]) -> str:
    """Return a line for each of CHOICES. Raises ValueError if a row has fewer than two seeds."""
    lines = []
    for name, algorithm in CHOICES.items():
        summary = summarise_row(document, name)
        if summary is None or len(summary.losses) < 2 or summary.rate_factor is None:
            raise ValueError(f"the trainings of {name}, or of DDP with AdamW, are not finished")
        spread = 100 * summary.spread / statistics.fmean(summary.losses)
        cells = [_percent(summary.over_adamw), _percent(summary.over_same), f"{spread:.1f}"]
        cells += [f"{summary.rate_factor:.2g}"]
        lines.append([_times(summary.times_fewer), f"`{algorithm}`", OPTIMIZERS[ROWS[name].inner].label, *cells])
    return table(CHOICES_HEAD, lines)


def outer_table(document: Mapping[str, Any]) -> str:
    """Return the losses of the outer optimizers, a column for each number of steps between rounds."""
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for name in OUTER:
        if records := best_records(document, name):
            cells[ROWS[name].label][OUTER_STEPS[name]] = f"{held_out_loss(next(iter(records.values()))):.3f}"
    columns = sorted(set(OUTER_STEPS.values()))
    lines = [[label, *(by_steps.get(steps, "") for steps in columns)] for label, by_steps in cells.items()]
    return table(["outer optimizer", *(f"every {steps} steps" for steps in columns)], lines)


def _percent(difference: float | None) -> str:
    return "" if difference is None else f"{round(difference, 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.0f}" if factor > 9.95 else f"{factor:.1f}"


def _is_at_edge(document: Mapping[str, Any], name: str, record: Record) -> bool:
    tuned = tuning_losses(_records_of(document, ROWS[name].rate_of or name))
    return record["rung"] in (min(tuned), max(tuned))


def _records_of(document: Mapping[str, Any], name: str) -> list[Record]:
    return [record for record in document["trainings"] if record["contestant"] == name and is_current(record)]


def best_records(document: Mapping[str, Any], name: str) -> dict[int, Record]:
    """Return a row's records at its best rate, by seed."""
    tuned = tuning_losses(_records_of(document, ROWS[name].rate_of or name))
    best = best_rung(tuned)
    return {record["seed"]: record for record in _records_of(document, name) if record["rung"] == best}


def _total_bytes(record: Record) -> float:
    return float(record["sent_bytes_a_step"] * record["steps"])


def _difference(records: Mapping[int, Record], references: Mapping[int, Record]) -> float | None:
    """Return by how many percent the mean loss over the common seeds is above the references'."""
    seeds = records.keys() & references.keys()
    if not seeds:
        return None
    loss, reference = (statistics.fmean(held_out_loss(of[seed]) for seed in seeds) for of in (records, references))
    return 100 * (loss / reference - 1)
