"""What algorithms cost in loss: two models trained on real data with each, from the same weights, on the same batches.

    python benchmarks/convergence.py            # about 14 minutes on two idle cores; `--quick` takes seconds
    python benchmarks/convergence.py --show benchmarks/results/convergence-....json

Every contestant is attached to DDP, trained, and detached, which gives all ranks the same weights; those are evaluated
on held-out data. The asynchronous one goes by the clock: its result depends on how fast the machine is. All have one
learning rate: AdamW on a rank's own gradients, which are noisier than averaged ones, makes less of it.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from convergence_rank import Settings
from convergence_report import draw, markdown_table, summarise
from convergence_tasks import TASKS
from environment import RESULTS, dated, environment_record
from processes import LOOPBACK, Limits, RankFailure, Stopped, free_port, run_ranks

QUICK_STEPS = 4
QUICK_HELD_OUT = 32


def run(arguments: argparse.Namespace, limits: Limits) -> list[dict[str, Any]]:
    """Train everything, in one set of processes. Raises RankFailure or Stopped."""
    with tempfile.TemporaryDirectory(prefix="torchbagua-convergence-") as folder:
        settings = Settings(
            scratch=folder,
            init_method=f"tcp://127.0.0.1:{free_port()}",
            num_ranks=arguments.ranks,
            num_seeds=1 if arguments.quick else arguments.seeds,
            steps={
                name: QUICK_STEPS if arguments.quick else arguments.steps or TASKS[name].steps
                for name in arguments.tasks
            },
            num_held_out=QUICK_HELD_OUT if arguments.quick else None,
        )
        run_ranks(
            "convergence_rank.py",
            settings,
            Path(folder),
            limits,
            "convergence",
            prefixes=[[]] * arguments.ranks,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK},
        )
        runs: list[dict[str, Any]] = json.loads(Path(folder, "results.json").read_text())
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ranks", type=int, default=4, help="an even number, which shift_one needs (default 4)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each contestant (default 3)")
    parser.add_argument("--steps", type=int, help="of every training (default: each task's own)")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds until all ends (default 3600)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed, little evaluation")
    parser.add_argument("--output", type=Path, help="folder of the results (default benchmarks/results)")
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the tables of an earlier run")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.ranks % 2:
        parser.error(f"--ranks must be an even number, at least 2, got {arguments.ranks}")
    for name, value in (("--seeds", arguments.seeds), ("--steps", arguments.steps)):
        if value is not None and value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    if "digits" in arguments.tasks and importlib.util.find_spec("sklearn") is None:
        parser.error("scikit-learn is not installed: pip install 'torchbagua[bench]'")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.show is not None:
        print("\n\n".join(map(markdown_table, json.loads(arguments.show.read_text())["tasks"])))
        return 0
    limits = Limits(arguments.deadline)
    folder = arguments.output or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_record()
    try:
        runs = run(arguments, limits)
    except (RankFailure, Stopped) as error:
        print(f"stopped by {error}" if isinstance(error, Stopped) else error, file=sys.stderr)
        return 128 + limits.signal if limits.signal else 1
    sections = [summarise(name, runs, arguments.ranks) for name in arguments.tasks]
    print("\n\n".join(map(markdown_table, sections)) + "\n")
    path = folder / f"{dated('convergence')}.json"
    path.write_text(json.dumps({"environment": environment, "tasks": sections}) + "\n")
    draw(sections).savefig(path.with_suffix(".png"))
    print(f"Results: {path} and {path.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
