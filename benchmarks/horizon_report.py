"""The tables of the horizon benchmark."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from convergence_sweep import best_rung, held_out_loss, tuning_losses
from horizon_rows import MAIN, MORE, OUTER, OUTER_STEPS, ROWS, Record
from table import table

REFERENCE = "adamw_ddp"  # each row is also compared with DDP and its own optimizer
INNER = {"adamw": "AdamW", "muon": "Muon", "orthogonal": "its own", "sign": "its own"}
HEAD = (
    *("method", "optimizer", "rate", "seeds", "loss, nats per byte"),
    *("vs. DDP and AdamW, %", "vs. DDP and the same optimizer, %", "times fewer bytes than DDP"),
)


def rows_table(document: Mapping[str, Any], names: Iterable[str] = (*MAIN, *MORE)) -> str:
    """Return a line for each of the rows with finished trainings. Differences are of the same seeds."""
    references = {inner: best_records(document, f"{inner}_ddp") for inner in INNER if f"{inner}_ddp" in ROWS}
    lines = []
    for name in names:
        row, records = ROWS[name], best_records(document, name)
        if not records:
            continue
        losses = [held_out_loss(record) for record in records.values()]
        some = next(iter(records.values()))
        of_ddp = next((record for reference in references.values() for record in reference.values()), None)
        spread = f" \N{PLUS-MINUS SIGN} {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        cells = [f"{some['rate']:.3g}{' (at the edge)' * _is_at_edge(document, name, some)}", str(len(losses))]
        cells += [f"{statistics.fmean(losses):.3f}{spread}"]
        cells += [_difference(records, reference) for reference in (references["adamw"], references.get(row.inner, {}))]
        cells += ["" if of_ddp is None else _reduction(of_ddp, some)]
        lines.append([row.label, INNER[row.inner], *cells])
    return table(HEAD, lines)


def outer_table(document: Mapping[str, Any]) -> str:
    """Return the losses of the outer optimizers, a column for each number of steps between rounds."""
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for name in OUTER:
        if records := best_records(document, name):
            cells[ROWS[name].label][OUTER_STEPS[name]] = f"{held_out_loss(next(iter(records.values()))):.3f}"
    columns = sorted(set(OUTER_STEPS.values()))
    lines = [[label, *(of_label.get(steps, "") for steps in columns)] for label, of_label in cells.items()]
    return table(["outer optimizer", *(f"every {steps} steps" for steps in columns)], lines)


def _reduction(of_ddp: Record, record: Record) -> str:
    factor = _total_bytes(of_ddp) / _total_bytes(record)
    return f"{factor:.0f}" if factor > 9.95 else f"{factor:.1f}"


def _is_at_edge(document: Mapping[str, Any], name: str, record: Record) -> bool:
    tuned = tuning_losses(_records_of(document, ROWS[name].rate_of or name))
    return record["rung"] in (min(tuned), max(tuned))


def _records_of(document: Mapping[str, Any], name: str) -> list[Record]:
    return [record for record in document["trainings"] if record["contestant"] == name]


def best_records(document: Mapping[str, Any], name: str) -> dict[int, Record]:
    """Return a row's records at its best rate, by seed."""
    tuned = tuning_losses(_records_of(document, ROWS[name].rate_of or name))
    best = best_rung(tuned)
    return {record["seed"]: record for record in _records_of(document, name) if record["rung"] == best}


def _total_bytes(record: Record) -> float:
    return float(record["sent_bytes_a_step"] * record["steps"])


def _difference(records: Mapping[int, Record], references: Mapping[int, Record]) -> str:
    seeds = records.keys() & references.keys()
    if not seeds:
        return ""
    loss, reference = (statistics.fmean(held_out_loss(of[seed]) for seed in seeds) for of in (records, references))
    return f"{100 * (loss / reference - 1):+.1f}"
