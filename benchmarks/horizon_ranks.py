"""Checks the horizon benchmark's trainings in one process against trainings in four separate ranks.

    python benchmarks/horizon_ranks.py            # minutes on two cores; continues where it was stopped
    python benchmarks/horizon_ranks.py --show     # only the table of the stored results

horizon.py trains many models with four workers each in one process, with methods and optimizers that are written
again for stacked weights. This benchmark trains some of its rows, at their best learning rates, with four processes
that communicate over gloo, torch's own optimizers and the package's algorithms. Weights, batches and schedule are the
same. The bits are not: separate ranks sum in another order, and trainings diverge after a few hundred steps, so final
losses agree only within the noise floor, the standard deviation of the final losses of DDP with the same optimizer,
over its seeds. Rounding is a large part of it: horizon.json has one training of DiLoCo, 30 steps, float32, seed 1000,
on two devices. It ended at 1.4279 on an H100, and at 1.4170 on a CPU, where its row is outer_30_0.7_0.6_nesterov.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from convergence_sweep import Record, held_out_loss, save
from environment import RESULTS, note_environment
from horizon_optimizers import OPTIMIZERS
from horizon_ranks_rank import ALGORITHMS, Settings
from horizon_report import best_records
from horizon_rows import ROWS
from horizon_training import NUM_WORKERS
from processes import LOOPBACK, Limits, RankFailure, Stopped, free_port, run_ranks
from table import table

PATIENCE_S = 120
HEAD = (
    *("method", "optimizer", "seed", "loss, separate ranks", "loss, one process", "difference, %"),
    *("bytes a step, counted by the kernel", "computed"),
)


def reference(document: dict[str, Any], row: str, seed: int) -> Record:
    """Return the training in one process at the row's best rate with `seed`.

    Raises:
        ValueError: there is none.
    """
    records = best_records(document, row)
    if seed not in records:
        raise ValueError(f"horizon.py has not trained {row} with seed {seed}, only with {sorted(records)}")
    return records[seed]


def find(records: Sequence[Record], like: Record) -> Record | None:
    """Return the training of separate ranks with the row, rate, seed and steps of `like`."""
    keys = ("contestant", "rung", "rate", "seed", "steps")
    return next((record for record in records if all(record[key] == like[key] for key in keys)), None)


def ranks_table(horizon: dict[str, Any], records: Sequence[Record]) -> str:
    """Return a line for each training of separate ranks, beside the one in one process."""
    lines = []
    for name in ALGORITHMS:
        for one_process in best_records(horizon, name).values():
            if (ranks := find(records, one_process)) is None:
                continue
            loss, expected = held_out_loss(ranks), held_out_loss(one_process)
            cells = [str(ranks["seed"]), f"{loss:.4f}", f"{expected:.4f}", f"{100 * (loss / expected - 1):+.2f}"]
            cells += [f"{record['sent_bytes_a_step']:,.0f}" for record in (ranks, one_process)]
            lines.append([ROWS[name].label, OPTIMIZERS[ROWS[name].inner].label, *cells])
    return table(HEAD, lines)


def train(like: Record, settings: dict[str, Any], num_steps: int, limits: Limits) -> Record:
    """Train like a training in one process, in four ranks. Raises RankFailure or Stopped."""
    with tempfile.TemporaryDirectory(prefix="torchbagua-horizon-ranks-") as folder:
        run_ranks(
            "horizon_ranks_rank.py",
            Settings(
                scratch=folder,
                init_method=f"tcp://127.0.0.1:{free_port()}",
                patience_s=PATIENCE_S,
                row=like["contestant"],
                rung=like["rung"],
                rate=like["rate"],
                seed=like["seed"],
                num_steps=num_steps,
                width=settings["width"],
                num_layers=settings["layers"],
            ),
            Path(folder),
            limits,
            "horizon, separate ranks",
            prefixes=[[]] * NUM_WORKERS,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK},
            stall_s=2 * PATIENCE_S,  # gloo's own timeout reports more
        )
        record: Record = json.loads((Path(folder) / "record.json").read_text())
        return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), metavar="ROW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of each row, if horizon.py has trained them")
    parser.add_argument("--steps", type=int, help="shorter trainings, which the table does not show")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds until the run stops")
    parser.add_argument("--horizon", type=Path, default=RESULTS / "horizon.json", help="results of horizon.py")
    parser.add_argument("--json", type=Path, default=RESULTS / "horizon-ranks.json", help="file of results")
    parser.add_argument("--show", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    horizon = json.loads(arguments.horizon.read_text())
    document: dict[str, Any] = {"settings": horizon["settings"], "environments": [], "trainings": []}
    if arguments.json.exists():
        document = json.loads(arguments.json.read_text())
    if document["settings"] != horizon["settings"]:
        parser.error(f"{arguments.json} and {arguments.horizon} have different settings; pass another --json")
    if not arguments.show:
        limits = Limits(arguments.deadline)
        note_environment(document["environments"])
        try:
            for row, seed in product(arguments.rows, arguments.seeds):
                like = reference(horizon, row, seed) | ({"steps": arguments.steps} if arguments.steps else {})
                if find(document["trainings"], like) is None:
                    record = train(like, horizon["settings"], like["steps"], limits)
                    document["trainings"].append(record)
                    save(arguments.json, document)
        except ValueError as error:
            parser.error(str(error))
        except (RankFailure, Stopped) as error:
            print(f"{error}\nThe same command continues from {arguments.json}.", file=sys.stderr)
            return 1
    print(ranks_table(horizon, document["trainings"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
