"""The table of the horizon benchmark."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from convergence_sweep import best_rung, held_out_loss, tuning_losses
from horizon_rows import ROWS, Record

REFERENCE = "adamw_ddp"  # (A); (B) is DDP with the same inner optimizer
HEADER = (
    "| method | inner optimizer | best rate | seeds | held-out loss | vs. DDP, AdamW | vs. DDP, same optimizer "
    "| bytes a step | fewer bytes |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def markdown_table(document: Mapping[str, Any]) -> str:
    """Return a line for each row with finished trainings. Differences are of the same seeds."""
    by_row: dict[str, list[Record]] = defaultdict(list)
    for record in document["trainings"]:
        by_row[record["contestant"]].append(record)
    lines = [HEADER]
    for name, row in ROWS.items():
        tuned = tuning_losses(by_row[row.rate_of or name])
        records = _at_best(by_row[name], tuned)
        if not records:
            if by_row[name]:
                lines.append(f"| {row.label} | {row.inner} | diverges at all {len(by_row[name])} rates | | | | | | |")
            continue
        losses = [held_out_loss(record) for record in records.values()]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        some = next(iter(records.values()))
        is_edge = some["rung"] in (min(tuned), max(tuned))
        references = [
            _at_best(by_row[reference], tuning_losses(by_row[reference]))
            for reference in (REFERENCE, f"{row.inner}_ddp")
        ]
        ddp_bytes = next((_total_bytes(of[seed]) for of in references for seed in of), None)
        fewer = "" if ddp_bytes is None else f"{ddp_bytes / _total_bytes(some):.3g}"
        cells = [
            row.label,
            row.inner,
            f"{some['rate']:.3g}{' (edge)' * is_edge}",
            str(len(losses)),
            f"{statistics.fmean(losses):.4f}{spread}",
            *(_difference(records, reference) for reference in references),
            f"{some['sent_bytes_a_step']:,.0f}",
            fewer,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_records(document: Mapping[str, Any], name: str) -> dict[int, Record]:
    """Return a row's records at its best rate, by seed."""
    rate_of = ROWS[name].rate_of or name
    records = {
        row: [record for record in document["trainings"] if record["contestant"] == row] for row in (name, rate_of)
    }
    return _at_best(records[name], tuning_losses(records[rate_of]))


def _at_best(records: Sequence[Record], tuned: Mapping[int, float]) -> dict[int, Record]:
    """Return the records at the best rate, by seed."""
    best = best_rung(tuned)
    return {record["seed"]: record for record in records if record["rung"] == best}


def _total_bytes(record: Record) -> float:
    return float(record["sent_bytes_a_step"] * record["steps"])


def _difference(records: Mapping[int, Record], references: Mapping[int, Record]) -> str:
    seeds = records.keys() & references.keys()
    if not seeds:
        return ""
    loss, reference = (statistics.fmean(held_out_loss(of[seed]) for seed in seeds) for of in (records, references))
    return f"{100 * (loss / reference - 1):+.2f} %"
