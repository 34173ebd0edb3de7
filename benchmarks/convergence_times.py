"""Times the convergence benchmark's steps over emulated slow networks, for its time to the target loss.

    python benchmarks/convergence_times.py      # root, Linux, an idle machine; `--quick`: one step of each
    python benchmarks/convergence.py --show --times benchmarks/results/convergence-times.json

New times replace those in the file; the times of contestants that are not measured stay.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from convergence_contestants import BASELINE, CONTESTANTS
from convergence_sweep import save
from convergence_tasks import TASKS
from convergence_times_rank import Settings
from environment import RESULTS, note_environment
from network import RANK_ENVIRONMENT
from processes import Limits, RankFailure, Stopped, run_ranks
from report import bits_per_second
from torchbagua.cli.namespaces import EmulatedNetwork, NetworkError, remove_stale_namespaces, why_unavailable

StepMs = dict[str, dict[str, list[float]]]  # of each round, by task and contestant


def measure(arguments: argparse.Namespace, limits: Limits, rate: str) -> StepMs:
    """Measure the step times at one rate. Raises RankFailure, NetworkError or Stopped."""
    network = EmulatedNetwork([0] * arguments.ranks, rank_rate=rate)
    with tempfile.TemporaryDirectory(prefix="torchbagua-convergence-times-") as folder, network:
        settings = Settings(
            scratch=folder,
            init_method=f"tcp://{network.address(0)}:29500",
            num_ranks=arguments.ranks,
            tasks=arguments.tasks,
            contestants=list(dict.fromkeys([BASELINE, *arguments.only])),
            num_steps=1 if arguments.quick else arguments.steps,
            num_rounds=1 if arguments.quick else arguments.rounds,
        )
        run_ranks(
            "convergence_times_rank.py",
            settings,
            Path(folder),
            limits,
            rate,
            prefixes=[["ip", "netns", "exec", network.namespace(rank)] for rank in range(arguments.ranks)],
            environment=RANK_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"},
        )
        step_ms: StepMs = json.loads(Path(folder, "step_ms.json").read_text())
    return step_ms


def parse_arguments() -> argparse.Namespace:
    def rate(text: str) -> str:
        bits_per_second(text)
        return text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), help="contestants")
    parser.add_argument("--rates", type=rate, nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="steps of one block (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each contestant (default 5)")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds until the run stops (default: none)")
    parser.add_argument("--quick", action="store_true", help="one round of one step")
    parser.add_argument("--json", type=Path, default=RESULTS / "convergence-times.json", help="file of the times")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    reason = why_unavailable()
    if reason is not None:
        print(f"No emulated network: {reason}.", file=sys.stderr)
        return 1
    limits = Limits(arguments.deadline)
    remove_stale_namespaces()
    document: dict[str, Any] = {"environments": [], "step_ms": {}}
    if arguments.json.exists():
        document = json.loads(arguments.json.read_text())
    note_environment(document["environments"])
    for rate in arguments.rates:
        try:
            measured = measure(arguments, limits, rate)
        except (RankFailure, NetworkError, Stopped) as error:
            print(f"{rate}: stopped by {error}" if isinstance(error, Stopped) else error, file=sys.stderr)
            return 128 + limits.signal if limits.signal else 1
        known: StepMs = document["step_ms"].setdefault(rate, {})
        for task, by_contestant in measured.items():
            known.setdefault(task, {}).update(by_contestant)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        save(arguments.json, document)
    print(f"Times: {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
