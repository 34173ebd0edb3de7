"""Measures elastic training with real processes over gloo: recovery, joining, what 200 changes leave, and faults.

    python benchmarks/elastic.py            # three quarters of an hour, as root on Linux; `--quick` takes a minute
    python benchmarks/elastic.py --only kill generations
    python benchmarks/elastic.py --show benchmarks/results/elastic-....json

Each round of a section harms one process or two, waits until the others train on, starts as many new processes, and
waits until all train. Without root (or `ip`, or `tc`) the sections that need network namespaces are left out. Processes
log the times at which steps end. docs/benchmarks.md explains the figures.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import elastic_rank
from elastic_faults import ELASTIC, PLAIN, Training, draw_faults
from elastic_rank import FIGURES_AT_STEP, POLL_S, Process, Settings
from elastic_report import FAULTS, tables_of
from environment import RESULTS, dated, write_record
from processes import LOOPBACK, Limits, RankFailure, Stopped, free_port
from report import bits_per_second
from torchbagua.cli.namespaces import (
    EmulatedNetwork,
    NetworkError,
    remove_stale_namespaces,
    run_command,
    why_unavailable,
)

Figures = dict[str, Any]

PATIENCE_S = 60  # beyond the timeout of the training


@dataclass(frozen=True)
class Section:
    """Rounds of one kind of harm.

    Attributes:
        signal: that the processes get; None: the link of a process is set down.
        is_slow: whether a large model trains over a shaped network, instead of a small one over loopback.
        harms_newest: whether each round harms the process that has come last, so that all others stay.
    """

    title: str
    signal: signal.Signals | None
    size: int = 4
    num_harmed: int = 1
    is_slow: bool = False
    harms_newest: bool = False


SECTIONS = {
    "kill": Section("one of four killed", signal.SIGKILL),
    "kill-two": Section("two of five killed", signal.SIGKILL, size=5, num_harmed=2),
    "kill-slow": Section("one of four killed", signal.SIGKILL, is_slow=True),
    "link-down": Section("link of one of four down", None),
    "stop": Section("one of four stopped", signal.SIGSTOP),
    "leave": Section("one of four gets SIGTERM", signal.SIGTERM),
    "generations": Section("one leaves, one joins", signal.SIGTERM, harms_newest=True),
}
NEED_LINKS = [name for name, section in SECTIONS.items() if section.is_slow or section.signal is None]
FAULTS_TIMEOUT_S = 30.0  # the default of elastic.run: processes import torch at their own pace


class Job:
    """The processes of an elastic training, forked from this one; all end with the block.

    Each has a slot, with a network namespace if the network is emulated. A new process takes the slot of one that is
    gone.
    """

    def __init__(self, settings: Settings, size: int, limits: Limits, network: EmulatedNetwork | None) -> None:
        self._settings = settings
        self._limits = limits
        has_links = network is not None and len(network.nodes) > 1
        self._namespaces = [network.namespace(slot if has_links else 0) if network else None for slot in range(size)]
        self._ever: list[Process] = []
        host, device = (network.address(0), "eth0") if network and has_links else ("127.0.0.1", LOOPBACK)
        port = 29500 if network else free_port()
        self._common = {"GLOO_SOCKET_IFNAME": device}
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        self.members = [self._start(slot, meeting | {"RANK": str(slot)}) for slot in range(size)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ever:
            process.end()

    def _start(self, slot: int, environment: dict[str, str]) -> Process:
        arguments = self._settings, self._namespaces[slot], self._common | environment
        context = multiprocessing.get_context("fork")
        forked = context.Process(target=elastic_rank.run_forked, args=arguments, daemon=True)
        forked.start()
        assert forked.pid is not None
        self._ever.append(Process(forked.pid, slot, self._settings.scratch, forked.is_alive))
        return self._ever[-1]

    def join(self, slot: int) -> Process:
        """Start a process that joins."""
        known = [member.newest for member in self.members if member.begun]
        addresses = ",".join(f"{event['host']}:{event['port']}" for event in known)
        joiner = self._start(slot, {"TORCHBAGUA_JOIN": addresses})
        self.members.append(joiner)
        return joiner

    def await_steps(self, num_steps: int) -> None:
        """Wait until the members are those of one generation, and each of them has finished these steps there."""
        end_s = time.monotonic() + self._settings.timeout_s + PATIENCE_S
        while not self._have_trained(num_steps):
            self._limits.check()
            for member in self.members:
                if not member.is_alive():
                    raise RankFailure(f"process {member.pid} has ended:\n{member.output()}")
            if time.monotonic() > end_s:
                logs = "\n".join(member.output() for member in self.members)
                raise RankFailure(f"the processes do not train:\n{logs}")
            time.sleep(POLL_S)

    def _have_trained(self, num_steps: int) -> bool:
        if not all(member.read().begun for member in self.members):
            return False
        generation = max(max(member.begun) for member in self.members)
        return all(
            len(member.steps.get(generation, ())) >= num_steps and member.newest["size"] == len(self.members)
            for member in self.members
        )


def step_s_of(process: Process) -> float:
    """Return the time of a step in the current generation of a process."""
    times_s = [step["at_s"] for step in process.steps[max(process.begun)]][-20:]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times_s))


def run_round(job: Job, section: Section, index: int, draw: random.Random, network: EmulatedNetwork | None) -> Figures:
    """Harm processes, replace them, and return the times. Everything is in seconds."""
    job.await_steps(FIGURES_AT_STEP)
    step_s = max(map(step_s_of, job.members))
    time.sleep(draw.uniform(0, step_s))
    generation, size = max(job.members[0].begun), len(job.members)
    if section.harms_newest:
        harmed = [job.members[-1]]
    else:
        ranks = {(index + other * (1 + index // size % (size - 1))) % size for other in range(section.num_harmed)}
        harmed = [member for member in job.members if member.newest["rank"] in ranks]
    figures: Figures = {"ranks": [process.newest["rank"] for process in harmed], "step_s": step_s}
    job.members = [member for member in job.members if member not in harmed]
    at_s = time.monotonic()
    for process in harmed:
        harm(process, section.signal, network)
    job.await_steps(1)
    figures |= times_of_change(job.members, generation, at_s)
    figures["lost_s"] = stall_s(job.members, generation) - step_s
    last_steps = {member.steps[generation][-1]["step"] for member in job.members if member.steps[generation]}
    figures["one_was_behind"] = len(last_steps) > 1
    if section.signal is signal.SIGTERM:
        end_s = time.monotonic() + PATIENCE_S
        while harmed[0].is_alive() and time.monotonic() < end_s:
            time.sleep(POLL_S)
    for process in harmed:
        process.end()
        if section.signal is None and network is not None:
            set_link(network, process.slot, "up")
    return figures | join_again(job, [process.slot for process in harmed])


def harm(process: Process, number: signal.Signals | None, network: EmulatedNetwork | None) -> None:
    if number is not None:
        os.kill(process.pid, number)
    elif network is not None:
        set_link(network, process.slot, "down")


def set_link(network: EmulatedNetwork, slot: int, state: str) -> None:
    run_command("ip", "-n", network.switch, "link", "set", f"port{slot}", state)


def times_of_change(members: Sequence[Process], generation: int, at_s: float) -> Figures:
    """Return how long after `at_s` the last member has noticed it, has begun the next generation, and a step there."""
    ends = [member.others["ends", generation] for member in members if ("ends", generation) in member.others]
    return {
        "noticed_s": max((event["at_s"] for event in ends), default=at_s) - at_s,
        "begun_s": max(member.newest["at_s"] for member in members) - at_s,
        "recovered_s": max(member.steps[max(member.begun)][0]["at_s"] for member in members) - at_s,
        "num_changes": max(members[0].begun) - generation,
    }


def stall_s(members: Sequence[Process], generation: int) -> float:
    """Return the longest time from the last step in a generation to the first in the newest one."""
    return max(
        member.steps[max(member.begun)][0]["at_s"]
        - (member.steps[generation] or [member.begun[generation]])[-1]["at_s"]
        for member in members
    )


def join_again(job: Job, slots: Sequence[int]) -> Figures:
    """Start processes that join, and return the times if it is one. It is ready when it calls `elastic.run`."""
    job.await_steps(FIGURES_AT_STEP)
    others, generation = [*job.members], max(job.members[0].begun)
    step_s = max(map(step_s_of, others))
    joiners = [job.join(slot) for slot in slots]
    job.await_steps(1)
    if len(joiners) > 1:
        return {}
    [joiner] = joiners
    ready_s = joiner.others["asks", None]["at_s"]
    late_s = 0.0
    for member in others:
        times_s = [step["at_s"] for step in member.steps[generation]]
        pairs = itertools.pairwise(times_s)
        late_s = max(late_s, sum(b - a - step_s for a, b in pairs if joiner.started_s < b < ready_s))
    return {
        "join": {
            "step_s": step_s,
            "start_s": ready_s - joiner.started_s,
            "lost_before_ready_s": late_s,
            "lost_s": stall_s(others, generation) - step_s,
            **times_of_change(job.members, generation, ready_s),
        }
    }


def loopback_network(arguments: argparse.Namespace) -> EmulatedNetwork | None:
    """Return a network of one namespace, in which all processes use the loopback device.

    The server of a TCPStore looks up the name of each client, and serves nobody until the name server has answered
    (torch 2.13). In the namespace there is none, and the lookup fails at once.
    """
    return EmulatedNetwork([0]) if arguments.has_namespaces else None


def run_section(name: str, arguments: argparse.Namespace, limits: Limits) -> Figures:
    """Run the rounds of a section."""
    section = SECTIONS[name]
    network = loopback_network(arguments)
    if name in NEED_LINKS:
        network = EmulatedNetwork([0] * section.size, rank_rate=arguments.rate if section.is_slow else None)
    num_parameters = round(1e6 * (arguments.params if section.is_slow else arguments.small_params))
    num_rounds = arguments.changes // 2 if name == "generations" else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="torchbagua-elastic-") as scratch, network or contextlib.nullcontext():
        settings = Settings(
            scratch=scratch,
            num_parameters=num_parameters,
            compute_s=0.0 if section.is_slow else arguments.step_ms / 1e3,
            algorithm=arguments.algorithm if section.is_slow else "gradient_allreduce",
            timeout_s=arguments.timeout,
            num_steps=sys.maxsize,
            checkpoint_every_steps=0,
        )
        draw, rounds = random.Random(arguments.seed), []
        with Job(settings, section.size, limits, network) as job:
            for index in tqdm(range(num_rounds), desc=name, unit="round", leave=False):
                rounds.append(run_round(job, section, index, draw, network))
            job.await_steps(FIGURES_AT_STEP)
            stayed = [member.others for member in job.members if 0 in member.begun]
            last = max(job.members[0].begun)
    # The second and the last generation have as many ranks.
    kept = [[process["figures", number] for number in (2, last)] for process in stayed if ("figures", 2) in process]
    return {
        "name": name,
        "title": section.title,
        "num_parameters": num_parameters,
        "rate": arguments.rate if section.is_slow else None,
        "network": arguments.rate if section.is_slow else "unshaped" if name in NEED_LINKS else "loopback",
        "timeout_s": arguments.timeout,
        "rounds": rounds,
        "num_changes": last,
        "resources": kept if name == "generations" else [],
    }


def run_faults(arguments: argparse.Namespace, limits: Limits) -> Figures:
    """Train to a number of steps in four ways."""
    faults = draw_faults(arguments.seed, arguments.fault_every, 1 if arguments.quick else 10_000)
    runs = []
    for kind, has_faults in ((PLAIN, False), (ELASTIC, False), (ELASTIC, True), (PLAIN, True)):
        network = loopback_network(arguments)
        with tempfile.TemporaryDirectory(prefix="torchbagua-elastic-") as scratch, network or contextlib.nullcontext():
            settings = Settings(
                scratch=scratch,
                num_parameters=round(1e6 * arguments.small_params),
                compute_s=arguments.step_ms / 1e3,
                algorithm="gradient_allreduce",
                timeout_s=FAULTS_TIMEOUT_S,
                num_steps=arguments.steps,
                checkpoint_every_steps=arguments.checkpoint_every if has_faults and kind == PLAIN else 0,
            )
            prefix = ["ip", "netns", "exec", network.namespace(0)] if network else []
            with Training(kind, settings, limits, prefix) as training:
                figures = training.run(faults if has_faults else [])
        runs.append({"kind": kind, "has_faults": has_faults, **figures})
    chosen = ("steps", "step_ms", "small_params", "seed", "fault_every", "checkpoint_every")
    return {"name": FAULTS, "runs": runs} | {name: vars(arguments)[name] for name in chosen}


def parse_arguments() -> argparse.Namespace:
    names = [*SECTIONS, FAULTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="sections (default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="of each section but generations (default 20)")
    parser.add_argument("--changes", type=int, default=200, help="of the section generations (default 200)")
    parser.add_argument("--step-ms", type=float, default=40.0, help="how long a step of the small model waits")
    parser.add_argument("--small-params", type=float, default=0.1, help="millions of parameters over loopback")
    parser.add_argument("--params", type=float, default=12.5, help="millions of parameters over the slow network")
    parser.add_argument("--rate", default="200mbit", help="of each rank's link in the slow network (default 200mbit)")
    parser.add_argument("--algorithm", default="bytegrad", help="over the slow network (default bytegrad)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds, of elastic.run (default 10)")
    parser.add_argument("--steps", type=int, default=2000, help="of the section faults (default 2000)")
    parser.add_argument("--fault-every", type=float, default=30.0, help="seconds between faults (default 30)")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps, of plain DDP (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of faults")
    parser.add_argument("--deadline", type=float, default=7200.0, help="seconds until the run stops (default 7200)")
    parser.add_argument(
        "--quick", action="store_true", help="one round, 4 changes, 2 M parameters, 80 steps, one fault"
    )
    parser.add_argument("--json", type=Path, help="file of the results (default benchmarks/results/elastic-DATE.json)")
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the tables of an earlier run")
    arguments = parser.parse_args()
    bits_per_second(arguments.rate)
    if arguments.quick:
        arguments.rounds, arguments.changes, arguments.params = 1, min(arguments.changes, 4), 2.0
        arguments.steps, arguments.fault_every, arguments.checkpoint_every = 80, 1.5, 20
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.show is not None:
        print(tables_of(json.loads(arguments.show.read_text())["sections"]))
        return 0
    limits = Limits(arguments.deadline)
    path = arguments.json or RESULTS / f"{dated('elastic')}.json"
    names = arguments.only
    sections, complaints = list[Figures](), list[str]()
    reason = why_unavailable()
    arguments.has_namespaces = reason is None
    if reason is None:
        remove_stale_namespaces()
    elif missing := [name for name in names if name in NEED_LINKS]:
        complaints.append(f"no emulated network: {reason}. Not measured: {', '.join(missing)}")
        names = [name for name in names if name not in missing]
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    importlib.import_module("torch._dynamo")  # imported before the fork: each optimizer imports it
    try:
        for name in names:
            try:
                sections.append(
                    run_faults(arguments, limits) if name == FAULTS else run_section(name, arguments, limits)
                )
            except (RankFailure, NetworkError) as error:
                complaints.append(f"{name}: {error}")
                continue
            print(tables_of(sections[-1:]) + "\n", flush=True)
            write_record(path, {"sections": sections})
    except Stopped as stopped:
        complaints.append(f"stopped by {stopped}; {len(sections)} sections were measured")
    return limits.end(path, sections, complaints)


if __name__ == "__main__":
    sys.exit(main())
