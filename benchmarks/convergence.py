"""Measures the loss of each contestant and its time to a target loss, each at its own best learning rate.

    python benchmarks/convergence.py            # hours on two cores; continues where it was stopped
    python benchmarks/convergence.py --quick    # a minute
    python benchmarks/convergence.py --show     # only the tables and the picture of the stored results

Every contestant trains its tasks with four ranks, from the same weights, on the same batches. It tries each learning
rate of a grid with a separate seed; see convergence_sweep.py. The best rate is trained with the reported seeds. Each
finished training is stored in a JSON file, from which the same command continues. The mean of the ranks' weights is
evaluated on held-out data. convergence_times.py measures the step times, for the time to the target loss.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convergence_contestants import CONTESTANTS
from convergence_pictures import draw
from convergence_rank import Settings
from convergence_report import markdown_table, summarise
from convergence_sweep import RATE_FACTOR, Document, Sweep, load, save
from convergence_tasks import TASKS
from environment import RESULTS, note_environment
from processes import LOOPBACK, Limits, RankFailure, Stopped, free_port, run_ranks

QUICK_STEPS = 4
QUICK_HELD_OUT = 32


def run(arguments: argparse.Namespace, limits: Limits, document: Document) -> None:
    """Train everything that is missing, in one set of processes. Raises RankFailure or Stopped."""
    sweep = Sweep(
        tasks=arguments.tasks,
        contestants=arguments.only,
        rungs=arguments.rungs,
        grows=arguments.rungs is None,
        seeds=list(range(1 if arguments.quick else arguments.seeds)),
    )
    with tempfile.TemporaryDirectory(prefix="torchbagua-convergence-") as folder:
        settings = Settings(
            scratch=folder,
            results=str(arguments.json),
            init_method=f"tcp://127.0.0.1:{free_port()}",
            num_ranks=arguments.ranks,
            patience_s=arguments.patience,
            sweep=asdict(sweep),
            steps=arguments.steps,
            num_held_out=QUICK_HELD_OUT if arguments.quick else None,
            facts=document["settings"],
        )
        run_ranks(
            "convergence_rank.py",
            settings,
            Path(folder),
            limits,
            "convergence",
            prefixes=[[]] * arguments.ranks,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK},
            stall_s=2 * arguments.patience,  # gloo's own timeout reports more
        )


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that must be equal for all results of a file."""
    by_task = {
        f"{key} of {name}": value
        for name, task in TASKS.items()
        for key, value in (("title", task.title), ("steps", arguments.steps[name]), ("rate", task.rate))
    }
    held_out = QUICK_HELD_OUT if arguments.quick else None
    return {"ranks": arguments.ranks, "rate factor": RATE_FACTOR, "held-out inputs": held_out, **by_task}


def report(arguments: argparse.Namespace, document: Document) -> None:
    """Print the tables of the finished trainings, and write their picture next to the JSON file."""
    times = json.loads(arguments.times.read_text()) if arguments.times else None
    sections = [summarise(name, document, times) for name in TASKS]
    sections = [section for section in sections if section["rows"]]
    if sections:
        print("\n\n".join(map(markdown_table, sections)) + "\n")
        draw(sections).savefig(arguments.json.with_suffix(".png"))
        print(f"Results: {arguments.json} and {arguments.json.with_suffix('.png').name}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), help="contestants")
    parser.add_argument(
        "--rungs",
        type=int,
        nargs="+",
        help=f"learning rates to try, as powers of {RATE_FACTOR} times the task's rate; grids do not grow then",
    )
    parser.add_argument("--ranks", type=int, default=4, help="an even number, as shift_one requires (default 4)")
    parser.add_argument("--seeds", type=int, default=3, help="reported trainings of each contestant (default 3)")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds until the run stops (default: none)")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds without a step that count as a hang (default 600)"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, one rate, one seed, a separate file"
    )
    parser.add_argument(
        "--json", type=Path, help="file of the results (default benchmarks/results/convergence[-quick].json)"
    )
    parser.add_argument("--times", type=Path, metavar="JSON", help="step times, written by convergence_times.py")
    parser.add_argument("--show", action="store_true", help="do not train")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.ranks % 2:
        parser.error(f"--ranks must be an even number, at least 2, got {arguments.ranks}")
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    if "digits" in arguments.tasks and importlib.util.find_spec("sklearn") is None:
        parser.error("scikit-learn is not installed: pip install 'torchbagua[bench]'")
    arguments.steps = {name: QUICK_STEPS if arguments.quick else task.steps for name, task in TASKS.items()}
    if arguments.quick:
        arguments.rungs = [0]
    if arguments.json is None:
        arguments.json = RESULTS / f"convergence{'-quick' * arguments.quick}.json"
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.show:
        report(arguments, json.loads(arguments.json.read_text()))
        return 0
    limits = Limits(arguments.deadline)
    try:
        document, changed = load(arguments.json, facts(arguments), arguments.steps)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name in changed:
        print(f"The settings of {name} have changed; it is trained again.")
    note_environment(document["environments"])
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    save(arguments.json, document)
    try:
        run(arguments, limits, document)
    except (RankFailure, Stopped) as error:
        print(f"stopped by {error}" if isinstance(error, Stopped) else error, file=sys.stderr)
        print(f"The same command continues from {arguments.json}.", file=sys.stderr)
        return 128 + limits.signal if limits.signal else 1
    report(arguments, json.loads(arguments.json.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
