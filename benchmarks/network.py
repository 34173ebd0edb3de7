"""Measures data-parallel training over an emulated slow network: ranks in network namespaces, links shaped by `tc`.

    python benchmarks/network.py            # about 12 minutes, root, Linux; `--quick` takes about one
    python benchmarks/network.py --show benchmarks/results/network-....json

Without root (or `ip`, or `tc`) it prints a notice and runs unshaped over the loopback device. docs/benchmarks.md
explains how speed is measured.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import (
    COMPUTE_ONLY,
    CONTESTANTS,
    FLAT_CONTESTANTS,
    HIERARCHICAL_CONTESTANTS,
    STRAGGLER_CONTESTANTS,
)
from environment import RESULTS, dated, write_record
from processes import LOOPBACK, Limits, RankFailure, Stopped, free_port, run_ranks
from rank import SLOWDOWN, Settings
from report import (
    Section,
    bits_per_second,
    byte_disagreements,
    summarise,
    summarise_straggler,
    table_of,
)
from torchbagua.cli.namespaces import (
    BURST,
    SMALL_BURST,
    EmulatedNetwork,
    NetworkError,
    remove_stale_namespaces,
    why_unavailable,
)

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Whether glibc returns freed gradients to the kernel depends on their place in the heap. Without these settings
    # chance decided, for the life of a process, which contestant paid for the page faults, a tenth of a step.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
}


@dataclass(frozen=True)
class Plan:
    """One table: the contestants, the network (None: loopback), and the slow rank."""

    title: str
    network: EmulatedNetwork | None
    contestants: list[str]
    slow_rank: int | None = None


def run_plan(arguments: argparse.Namespace, limits: Limits, plan: Plan) -> Section:
    """Measure one table. Raises RankFailure, NetworkError or Stopped."""
    network = plan.network
    nodes = network.nodes if network and network.link_rate else list(range(arguments.ranks))
    prefixes: list[list[str]] = [[] for _ in nodes]
    if network is not None:
        prefixes = [["ip", "netns", "exec", network.namespace(rank)] for rank in range(len(nodes))]
    with tempfile.TemporaryDirectory(prefix="torchbagua-network-") as folder, network or contextlib.nullcontext():
        settings = Settings(
            scratch=folder,
            init_method=f"tcp://{network.address(0)}:29500" if network else f"tcp://127.0.0.1:{free_port()}",
            switch=network.switch if network else None,
            nodes=nodes,
            contestants=plan.contestants,
            num_parameters=round(arguments.params * 1e6),
            is_idle=arguments.compute == "idle",
            compute_ms=arguments.compute_ms,
            bucket_cap_mb=arguments.bucket_cap_mb,
            block_steps=arguments.steps,
            free_block_s=arguments.free_block,
            slow_rank=plan.slow_rank,
            min_rounds=arguments.rounds,
            seconds=arguments.seconds,
        )
        environment = RANK_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0" if network else LOOPBACK}
        run_ranks("rank.py", settings, Path(folder), limits, plan.title, prefixes=prefixes, environment=environment)
        results = [json.loads(Path(folder, f"result{rank}.json").read_text()) for rank in range(len(nodes))]
    about: dict[str, Any] = {
        "title": plan.title,
        "rank_rate": network.rank_rate if network else None,
        "link_rate": network.link_rate if network else None,
        "congestion_control": network.congestion_control if network else None,
        "burst": network.burst if network else None,
        "nodes": nodes,
        "bucket_cap_mb": arguments.bucket_cap_mb,
        "is_idle": arguments.compute == "idle",
    }
    if plan.slow_rank is not None:
        return summarise_straggler(about, results, plan.slow_rank)
    return summarise(about, results, arguments.steps)


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """Plan every table that this machine can measure, and print those that it cannot."""
    chosen = arguments.only or [name for name, contestant in CONTESTANTS.items() if not contestant.must_be_named]
    flat = [name for name in FLAT_CONTESTANTS if name in chosen]
    hierarchical = [name for name in HIERARCHICAL_CONTESTANTS if name in chosen]
    reason = why_unavailable()
    if reason is not None:
        shaped = [rate for rate in arguments.rates if rate != "unshaped"]
        shaped += [f"{rate} between two nodes" for rate in arguments.link_rates]
        print(f"No emulated network: {reason}. Not measured: {', '.join(shaped) or 'nothing'}.")
        print("Instead: unshaped over the loopback device. All processes of this machine share its byte counter.\n")
        return [Plan("loopback, unshaped", None, [COMPUTE_ONLY, *flat])]
    for name in remove_stale_namespaces():
        print(f"Removed {name}, left over from a run that was killed.")
    options = {"congestion_control": arguments.congestion_control, "burst": burst_of(arguments)}

    def one_node(rate: str) -> EmulatedNetwork:
        shape = None if rate == "unshaped" else rate
        return EmulatedNetwork([0] * arguments.ranks, rank_rate=shape, **options)

    plans = [Plan(rate, one_node(rate), [COMPUTE_ONLY, *flat]) for rate in arguments.rates]
    nodes = [2 * rank // arguments.ranks for rank in range(arguments.ranks)]
    for rate in arguments.link_rates:
        network = EmulatedNetwork(nodes, link_rate=rate, **options)
        plans.append(Plan(f"{rate} between two nodes", network, [COMPUTE_ONLY, *hierarchical]))
    if arguments.straggler and not arguments.only:
        for rate in ("200mbit", "unshaped"):
            title = f"{rate}, the last rank takes {SLOWDOWN} times as long"
            plans.append(Plan(title, one_node(rate), STRAGGLER_CONTESTANTS, slow_rank=arguments.ranks - 1))
    return plans


def add_compute_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compute",
        choices=["real", "idle"],
        default="real",
        help="idle: as with an accelerator, CPUs wait for the recorded compute times (default real)",
    )
    parser.add_argument("--compute-ms", type=float, help="how long CPUs wait (default: as long as recorded)")


def check_compute_arguments(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, contestants: list[str]
) -> None:
    if arguments.compute == "idle" and any(CONTESTANTS[name].is_sharded for name in contestants):
        parser.error("--compute idle: FSDP2 and HSDP compute with weights that they gather; choose other contestants")
    if arguments.compute_ms is not None and (arguments.compute != "idle" or arguments.compute_ms <= 0):
        parser.error(f"--compute-ms must be positive and needs --compute idle, got {arguments.compute_ms:g}")


def burst_of(arguments: argparse.Namespace) -> str:
    """Return the burst of a link. It is small with idle models; while models compute, links pause little."""
    return SMALL_BURST if arguments.compute == "idle" else BURST


def parse_arguments() -> argparse.Namespace:
    def shaped_rate(text: str) -> str:
        bits_per_second(text)
        return text

    def rate(text: str) -> str:
        return text if text == "unshaped" else shaped_rate(text)

    names = [name for name in CONTESTANTS if name != COMPUTE_ONLY]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", type=rate, nargs="*", help="default 200mbit 1gbit unshaped")
    parser.add_argument("--link-rates", type=shaped_rate, nargs="*", default=["200mbit"], help="between two nodes")
    parser.add_argument("--params", type=float, default=12.5, help="millions of parameters (default 12.5)")
    add_compute_arguments(parser)
    parser.add_argument("--bucket-cap-mb", type=float, default=8.0, help="bucket size, except for PowerSGD (default 8)")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block (default 2)")
    parser.add_argument(
        "--free-block", type=float, default=4.0, help="seconds of a block if communication is not tied to steps"
    )
    parser.add_argument("--rounds", type=int, default=5, help="minimum number of blocks per contestant (default 5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="target time of one network's rounds (default 60)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        help="contestants (default: all but DiLoCo, FSDP2 and HSDP); compute only always runs",
    )
    parser.add_argument(
        "--straggler", action=argparse.BooleanOptionalAction, default=True, help="a table with one slow rank"
    )
    parser.add_argument("--congestion-control", choices=["reno", "cubic"], default="reno")
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds until the run stops (default 1200)")
    parser.add_argument("--quick", action="store_true", help="2 M parameters, 3 rounds of one step, no 1gbit")
    parser.add_argument("--json", type=Path, help="file of the results (default benchmarks/results/network-DATE.json)")
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the tables of an earlier run")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {arguments.ranks}")
    check_compute_arguments(parser, arguments, arguments.only or [])
    if arguments.rates is None:
        arguments.rates = ["200mbit", "unshaped"] if arguments.quick else ["200mbit", "1gbit", "unshaped"]
    if arguments.quick:
        arguments.params, arguments.steps, arguments.rounds, arguments.seconds = 2.0, 1, 3, 0.0
        arguments.free_block = 1.0
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.show is not None:
        print("\n\n".join(map(table_of, json.loads(arguments.show.read_text())["networks"])))
        return 0
    limits = Limits(arguments.deadline)
    path = arguments.json or RESULTS / f"{dated('network')}.json"
    sections: list[Section] = []
    complaints: list[str] = []
    try:
        for plan in make_plans(arguments):
            limits.check()
            try:
                section = run_plan(arguments, limits, plan)
            except (RankFailure, NetworkError) as error:
                complaints.append(f"{plan.title}: {error}")
                continue
            print(table_of(section) + "\n")
            sections.append(section)
            write_record(path, {"networks": sections})
            if plan.network is not None and plan.slow_rank is None:
                complaints += [f"{plan.title}: {message}" for message in byte_disagreements(section)]
    except Stopped as stopped:
        complaints.append(f"stopped by {stopped}; {len(sections)} networks were measured")
    return limits.end(path, sections, complaints)


if __name__ == "__main__":
    sys.exit(main())
