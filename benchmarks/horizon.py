"""Compares methods of data-parallel training over thousands of steps, each at its own best learning rate.

    python benchmarks/horizon.py                   # hours on two cores; continues where it was stopped
    python benchmarks/horizon.py --device cuda     # minutes on one H100
    python benchmarks/horizon.py --quick           # a minute
    python benchmarks/horizon.py --selftest --plan --device cuda    # CUDA graph against eager steps, time of a step
    python benchmarks/horizon.py --show            # only the table of the stored results

One process trains many models with four workers each; see horizon_training.py. horizon_rows.py lists the rows and
chooses their trainings. Each finished training is stored in a JSON file, from which the same command continues. The
mean of the workers' weights is evaluated on held-out data. horizon_ranks.py checks rows against separate processes that
train with torch's optimizers and the package's algorithms.
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convergence_sweep import RATE_FACTOR, save
from convergence_tasks import HELD_OUT_SEQUENCES
from environment import RESULTS, note_environment
from horizon_model import StackedGPT
from horizon_report import outer_table, rows_table
from horizon_rows import ROWS, RUNGS, SETS, is_current
from horizon_run import Run
from horizon_selftest import selftest
from horizon_training import NUM_WORKERS, Task
from processes import Limits, Stopped
from torchbagua.cli.demo.text import read_standard_library

QUICK_STEPS = 32
QUICK_HELD_OUT = 32
DEFAULT_BATCH = {"cpu": 5, "cuda": 40}


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the document in `path`, and report which rows have changed since it was written.

    Raises:
        ValueError: the file was written with other settings.
    """
    if not path.exists():
        return {"settings": settings, "environments": [], "trainings": []}
    document: dict[str, Any] = json.loads(path.read_text())
    if document["settings"] != settings:
        raise ValueError(f"{path} has other settings, {document['settings']}, not {settings}; pass another --json")
    if changed := sorted({record["contestant"] for record in document["trainings"] if not is_current(record)}):
        print(f"trainings of rows that have changed since are ignored: {', '.join(changed)}")
    return document


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=SETS, metavar="ROW", default=["main"], help="or main, more, outer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, help="trainings at a time (default 5, or 40 on a GPU)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rungs", type=int, nargs="+", default=list(RUNGS), help=f"powers of {RATE_FACTOR} to try")
    parser.add_argument("--text", type=Path, help="file to train on (default: Python's standard library)")
    parser.add_argument("--tf32", action="store_true", help="multiply float32 matrices in TF32")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds until the run stops (default: none)")
    parser.add_argument("--json", type=Path, help="file of results (default benchmarks/results/horizon[-quick].json)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one rate, a separate file")
    parser.add_argument("--selftest", action="store_true", help="first compare graph, eager and CPU, and time steps")
    parser.add_argument("--plan", action="store_true", help="only print what is missing")
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--picture", type=Path, help="with --show: also draw the chosen rows into this file")
    arguments = parser.parse_args()
    arguments.rows = list(dict.fromkeys(name for choice in arguments.rows for name in SETS[choice]))
    needed = {ROWS[name].rate_of for name in arguments.rows} - {None, *arguments.rows}
    arguments.rows = [*(name for name in ROWS if name in needed), *arguments.rows]  # rows whose best rate is used
    arguments.batch = arguments.batch or DEFAULT_BATCH[arguments.device]
    if arguments.quick:
        arguments.steps, arguments.rungs = QUICK_STEPS, [0]
    if arguments.json is None:
        arguments.json = RESULTS / f"horizon{'-quick' * arguments.quick}.json"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    return arguments


def load_text(path: Path | None) -> Tensor:
    return (
        read_standard_library() if path is None else torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    )


def main() -> int:
    arguments = parse_arguments()
    if arguments.show:
        document = json.loads(arguments.json.read_text())
        print(f"{rows_table(document)}\n\n{outer_table(document)}")
        if arguments.picture:
            from horizon_picture import draw  # matplotlib is not installed on every machine that trains

            draw(document, arguments.rows).savefig(arguments.picture)
        return 0
    if arguments.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    limits = Limits(arguments.deadline)
    text = load_text(arguments.text)
    model = StackedGPT(arguments.width, arguments.layers)
    num_held_out = QUICK_HELD_OUT if arguments.quick else HELD_OUT_SEQUENCES
    task = Task.from_text(model, text, torch.device(arguments.device), num_held_out)
    if arguments.selftest and not selftest(task, arguments.batch):
        print("the self-test failed: nothing is trained", file=sys.stderr)
        return 1
    settings = {
        "workers": NUM_WORKERS,
        "width": arguments.width,
        "layers": arguments.layers,
        "steps": arguments.steps,
        "held-out sequences": num_held_out,
        "text": f"{len(text)} bytes, sha256 {hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]}",
        "tf32": arguments.tf32,
        "rate factor": RATE_FACTOR,
    }
    try:
        document = load(arguments.json, settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    run = Run(arguments, task, document, limits)
    run.print_plan()
    if arguments.plan:
        return 0
    note_environment(document["environments"])
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    save(arguments.json, document)
    try:
        run.run()
    except Stopped as error:
        print(f"stopped by {error}; the same command continues from {arguments.json}.", file=sys.stderr)
        print(f"{rows_table(document)}\n\n{outer_table(document)}")
        return 128 + limits.signal if limits.signal else 1
    print(f"{rows_table(document)}\n\n{outer_table(document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
