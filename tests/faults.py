"""Trains in real processes, with faults at random moments: `make faults ARGS='--trials 200 --seed 0'`.

Each trial is drawn from its seed: an algorithm, 2 to 8 ranks on one or two nodes, training with or without
`elastic.run`, and one to three faults. A run with the same results file continues where it was stopped. `--only SEED`
runs one trial again and prints what the ranks wrote. Needs Linux, and root for two nodes, as network namespaces.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

import warm_python
from environment import write_record
from faults_rank import LIMIT_S, NUM_SAMPLES, TIMEOUT, VARIANTS, Program, Training
from processes import LOOPBACK, free_port
from torchbagua._text_table import table as text_table
from torchbagua.algorithms import available_algorithms
from torchbagua.cli.namespaces import EmulatedNetwork, remove_stale_namespaces, run_command, why_unavailable

RANK = Path(__file__).with_name("faults_rank.py")
TIMEOUT_S = TIMEOUT.total_seconds()
# Other programs may use the machine, and eight ranks share few cores.
MARGIN_S = 15.0
# A rank that is away for longer may be left out, since its mailbox is silent.
SILENT_S = 2.5
SHORT_S, LONG_S = 1.0, TIMEOUT_S + 3
KINDS = ("kill", "stop", "terminate", "link", "short stall", "long stall", "raise", "poison", "join")
BRIEF_KINDS = ("stop", "link")  # which may be too short to be noticed
OWN_KINDS = ("short stall", "long stall", "raise", "poison")
# How a process ends by a fault of its own.
ENDS = {"kill": "signal 9", "poison": "signal 9", "terminate": "signal 15", "raise": "UserError"}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
ALGORITHMS = (*sorted(available_algorithms()), *VARIANTS)


@dataclass(frozen=True)
class Fault:
    """A fault of a process: at its step, or so many seconds after some process has finished that step.

    A "join" starts the process, a "link" cuts the link between the nodes. `seconds` is how long it lasts.
    """

    kind: str
    process: int
    step: int
    delay_s: float
    seconds: float

    @property
    def is_long(self) -> bool:
        """Whether the others may go on without the process."""
        return self.kind not in ("short stall", "join") and (self.kind not in BRIEF_KINDS or self.seconds > SILENT_S)


@dataclass(frozen=True)
class Trial:
    """A training of some processes on these nodes, of which the last may join later, with faults."""

    seed: int
    algorithm: str
    is_elastic: bool
    size: int
    nodes: Sequence[int]
    num_steps: int
    faults: Sequence[Fault]

    @classmethod
    def drawn(cls, seed: int, *, has_nodes: bool = True) -> "Trial":
        """Return the trial of a seed. Consecutive seeds have all pairs of an algorithm and a kind of fault."""
        draw = random.Random(seed)
        algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
        is_elastic = algorithm != "shift_one" and draw.random() < 0.75  # which elastic training refuses
        size = draw.choice((2, 3, 4, 4, 4, 4, 8, 8) if algorithm != "shift_one" else (2, 4, 4, 8))
        num_left, has_two = draw.randrange(1, size), draw.random() < 0.5
        more = [kind for kind in KINDS if kind != "poison"]  # which ends most small jobs
        kinds = [KINDS[seed % len(KINDS)], *draw.choices(more, k=draw.choice((0, 0, 1, 2)) if is_elastic else 0)]
        faults, num_processes = list[Fault](), size
        for kind in kinds:
            if (kind == "link" and not has_nodes) or (kind == "join" and not is_elastic):
                kind = "kill"
            process = draw.randrange(num_processes)
            if kind == "join":
                process, num_processes = num_processes, num_processes + 1
            seconds = draw.choice((SHORT_S, draw.uniform(TIMEOUT_S - 1, LONG_S) if is_elastic else LONG_S))
            # A long stall outlasts the first wait for a busy rank, or also the second, of those who agree.
            lasting_s = {"stop": seconds, "link": seconds, "short stall": SHORT_S, "long stall": LONG_S + seconds}
            # Without elastic training, an error of DDP itself, which rebuilds its buckets in step 2, is torch's.
            step = draw.randrange(1 if is_elastic else 4, 15)
            faults.append(Fault(kind, process, step, draw.choice((0.1, 1.0)) * draw.random(), lasting_s.get(kind, 0.0)))
        has_two = has_nodes and (has_two or "link" in kinds)
        nodes = [int(has_two and num_left <= number < size) for number in range(num_processes)]
        return cls(seed, algorithm, is_elastic, size, nodes, 90 if num_processes > size else 50, faults)

    def program(self, number: int, **more: Any) -> Program:
        """Return what a process does."""
        own = [
            (index, fault.kind.split()[-1], fault.step, fault.seconds)
            for index, fault in enumerate(self.faults)
            if fault.kind in OWN_KINDS and (fault.process == number or fault.kind == "poison")
        ]
        return Program(self.algorithm, self.is_elastic, self.num_steps, own_faults=own, **more)


class Process:
    """A process of a trial, with the events that it has written."""

    def __init__(self, fork: warm_python.Fork) -> None:
        self.fork = fork
        self.events: list[dict[str, Any]] = []
        self.ended_s: float | None = None
        self.how: list[str] = []  # it has ended: the names of the error's classes, a word, or "signal" and its number
        self._num_read = 0

    def read(self) -> None:
        """Read new events, and whether it has ended."""
        if self.ended_s is not None:
            return
        has_ended = Path(f"/proc/{self.fork.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        text = self.fork.out.read_bytes()[self._num_read :]
        whole = text[: text.rfind(b"\n") + 1]
        self._num_read += len(whole)
        self.events += map(json.loads, whole.splitlines())
        if has_ended:
            self.ended_s = time.monotonic()
            status = self.fork.wait(MARGIN_S)
            self.how = next((event["how"] for event in self.all("ends")), [f"signal {-(status or 0)}"])

    def all(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [each for each in self.events if each["event"] == event]

    @property
    def num_steps(self) -> int:
        return max((each["step"] for each in self.all("steps")), default=0)


@dataclass
class Course:
    """What happened in a trial: its processes by number, and when each fault began."""

    trial: Trial
    processes: dict[int, Process]
    begun_s: dict[Fault, float]

    @cached_property
    def averages_weights(self) -> bool:
        return Training(self.trial.program(0)).algorithm.averages_weights

    @cached_property
    def begins(self) -> list[dict[str, Any]]:
        """The beginnings of generations, with the numbers of processes as members; -1 if it has begun none."""
        begins = [(number, event) for number, each in self.processes.items() for event in each.all("begins")]
        numbers = {event["members"][event["own"]]: number for number, event in begins}
        return [{**event, "members": [numbers.get(each, -1) for each in event["members"]]} for _, event in begins]

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The members of each generation."""
        return {event["generation"]: event["members"] for event in self.begins}

    def faults_of(self, number: int) -> list[Fault]:
        """Return the faults of a process that have begun; a cut link is one of all processes."""
        own = [self.trial.faults[event["number"]] for event in self.processes[number].all("fault")]
        others = [fault for fault in self.begun_s if fault.kind not in OWN_KINDS]
        return own + [fault for fault in others if fault.kind == "link" or fault.process == number]

    def is_quorum(self, generation: int, number: int) -> bool:
        """Return whether the members that a process can reach may decide on the generation after this one."""
        members, nodes = self.members[generation], self.trial.nodes
        reached = {number} & {*members}
        for other in {*members} - {number, -1}:
            faults, how = [fault for fault in self.faults_of(other) if fault.is_long], self.processes[other].how
            is_lost = any(fault.kind != "link" or nodes[other] != nodes[number] for fault in faults)
            # Whoever was away may find that the others have gone on, and have ended.
            was_away = any(fault.is_long and fault.kind != "link" for fault in self.faults_of(number))
            own_s, end_s = (self.processes[each].ended_s or math.inf for each in (number, other))
            if not is_lost and "NoProgressError" not in how and (not was_away or end_s >= own_s):
                reached.add(other)
        return 2 * len(reached) > len(members) or (2 * len(reached) == len(members) and members[0] in reached)

    def wait_s(self, fault: Fault) -> float | None:
        """Return the seconds until all others have taken a step after a fault; None if they have taken none.

        If it has changed the membership, a step after the change. For a join, from when the process asks to join.
        Without elastic training, until all others have ended.
        """
        begun_s, is_elastic = self.begun_s[fault], self.trial.is_elastic
        if fault.kind == "join":
            begun_s = max([begun_s, *(event["at_s"] for event in self.processes[fault.process].all("asks"))])
        waits_s = list[float]()
        for number, process in self.processes.items():
            is_other = fault.kind == "link" or fault not in self.faults_of(number)
            if process.how == ["done"] if is_elastic else fault.is_long and is_other:
                later = {event["generation"] for event in process.all("begins") if event["at_s"] > begun_s}
                first = min((each for each in later if self._is_answer(fault, number, self.members[each])), default=0)
                events = [event for event in process.all("steps" if is_elastic else "ends") if event["at_s"] > begun_s]
                waits_s += [event["at_s"] - begun_s for event in events if event.get("generation", 0) >= first][:1]
        return max(waits_s, default=None)

    def _is_answer(self, fault: Fault, number: int, members: Sequence[int]) -> bool:
        if fault.kind == "join":
            return fault.process in members
        if fault.kind == "link":
            return len({self.trial.nodes[each] for each in {number, *members} - {-1}}) == 1
        return any(fault in self.faults_of(each) and each not in members for each in self.processes)


def run_trial(trial: Trial, network: EmulatedNetwork | None, folder: Path) -> Course:
    """Run the processes of a trial until all have ended, or until the limit."""
    course, limit_s = Course(trial, {}, {}), time.monotonic() + LIMIT_S + MARGIN_S
    environment = {
        **os.environ,
        "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "eth0" if network else LOOPBACK,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "WORLD_SIZE": str(trial.size),
    }
    actions: list[tuple[float, Callable[[], object]]] = []
    pending = [fault for fault in trial.faults if fault.kind not in OWN_KINDS]
    with ExitStack() as stack:

        def start(number: int) -> None:
            node = trial.nodes[number]
            more: dict[str, Any] = {"namespace": network.namespace(node), "host": f"node{node}"} if network else {}
            if number >= trial.size:
                living = [process for process in course.processes.values() if process.ended_s is None]
                more["join"] = [event["address"] for process in living for event in process.all("begins")[-1:]]
            fork = warm_python.started(
                [RANK, json.dumps(asdict(trial.program(number, **more)))],
                out=folder / f"{trial.seed} {number}.out",
                err=folder / f"{trial.seed} {number}.err",
                env={**environment, "RANK": str(number)},
            )
            course.processes[number] = Process(stack.enter_context(fork))

        def begin(fault: Fault) -> None:
            process, now_s = course.processes.get(fault.process), time.monotonic()
            if fault.kind == "join":
                start(fault.process)
            elif fault.kind == "link":
                assert network is not None
                set_link(network, "down")
                actions.append((now_s + fault.seconds, partial(set_link, network, "up")))
            elif process is None or process.ended_s is not None or process.all("ends"):
                return
            else:
                process.fork.send_signal(SIGNALS[fault.kind])
                if fault.kind == "stop":
                    actions.append((now_s + fault.seconds, partial(process.fork.send_signal, signal.SIGCONT)))
            course.begun_s[fault] = now_s

        if network is not None:
            set_link(network, "up")
        for number in range(trial.size):
            start(number)
        while time.monotonic() < limit_s and any(each.ended_s is None for each in course.processes.values()):
            for process in course.processes.values():
                process.read()
            step = max(process.num_steps for process in course.processes.values())
            for fault in [each for each in pending if each.step <= step]:
                pending.remove(fault)
                actions.append((time.monotonic() + fault.delay_s, partial(begin, fault)))
            for action in [each for each in actions if each[0] <= time.monotonic()]:
                actions.remove(action)
                action[1]()
            time.sleep(0.01)
    for process in course.processes.values():
        for event in process.all("fault"):
            fault = trial.faults[event["number"]]
            course.begun_s[fault] = min(event["at_s"], course.begun_s.get(fault, event["at_s"]))
    return course


def set_link(network: EmulatedNetwork, state: str) -> None:
    """Cut or restore the link between the nodes: nobody is notified, packets are dropped."""
    run_command("ip", "-n", network.switch, "link", "set", "link0", state)


def violations(course: Course) -> Iterator[str]:
    """Yield what was wrong in a trial."""
    for number, process in course.processes.items():
        ends_s = [event["at_s"] for event in process.all("ends")]
        if process.ended_s is None:
            yield f"process {number} hangs"
        elif not {*process.how} & allowed_ends(course, number, process):
            yield f"process {number} ends with {process.how[0]}"
        elif ends_s and process.ended_s > ends_s[0] + MARGIN_S:
            yield f"process {number} needs {process.ended_s - ends_s[0]:.1f} s to exit"
    for fault in course.begun_s:
        # Faults may follow each other, so that one change answers all. A busy rank is waited for twice: in a step, and
        # by those who agree on the next members.
        limits_s = [TIMEOUT_S * (1 + (each.kind == "long stall")) + max(5.0, each.seconds) for each in course.begun_s]
        limit_s = sum(limits_s) + MARGIN_S
        if (seconds := course.wait_s(fault) or 0.0) > limit_s:
            yield f"{seconds:.1f} s after {fault}, more than {limit_s:.1f} s"
    if course.trial.is_elastic:
        yield from wrong_generations(course)
        yield from wrong_samples(course)


def allowed_ends(course: Course, number: int, process: Process) -> set[str]:
    """Return how a process may end."""
    own, faults = course.faults_of(number), [*course.begun_s]
    own_kinds, kinds = {fault.kind for fault in own}, {fault.kind for fault in faults}
    ends = {ENDS[kind] for kind in own_kinds if kind in ENDS}
    if not course.trial.is_elastic:
        # A rank that raises leaves asynchronous averaging, and a busy one averages on in the background.
        goes_on = {"done"} if course.trial.algorithm == "async" and kinds <= {"raise", "long stall"} else set[str]()
        return ends or ({"CommunicationError"} | goes_on if any(fault.is_long for fault in faults) else {"done"})
    begins = process.all("begins")
    if begins and not course.is_quorum(begins[-1]["generation"], number):
        ends.add("NoQuorumError")
        steps = [event for event in process.all("steps") if event["at_s"] < min(course.begun_s.values())]
        if kinds == {"kill"} and len(faults) == 1 and len(steps) < course.trial.num_steps - 5:
            return ends
    ends.add("done")
    if "terminate" in own_kinds:
        ends.add("left")  # the signal ends a process that has not called `run` yet
    if any(fault.kind in (*BRIEF_KINDS, "long stall") and fault.is_long for fault in own):
        ends.add("EvictedError")
    if "poison" in kinds:
        ends.add("NoProgressError")
    others = [each.ended_s or math.inf for each in course.processes.values() if each is not process]
    if not begins and max(others) < (process.ended_s or 0):
        ends |= {"TimeoutError", "ConnectionError"}  # the job to join has ended
    return ends


def wrong_generations(course: Course) -> Iterator[str]:
    """Yield generations with two lists of members or two first steps, and different weights at the end."""
    seen = defaultdict[int, set[Any]](set)
    for event in course.begins:
        seen[event["generation"]].add((event["step"], *event["members"]))
    yield from (f"generation {number} begins as {first}" for number, first in seen.items() if len(first) > 1)
    done = [process for process in course.processes.values() if process.how == ["done"]]
    for process in done:  # which has the state of another rank that has taken more steps, if a generation begins so
        if max(process.num_steps, process.all("begins")[-1]["step"]) < course.trial.num_steps:
            yield "a process ends early"
    if course.averages_weights:  # some may end while others begin one more generation
        done = [process for process in done if process.all("begins")[-1]["generation"] == max(seen)]
    if len({process.all("ends")[0]["weights"] for process in done}) > 1:
        yield "weights differ after the end"


def wrong_samples(course: Course) -> Iterator[str]:
    """Yield samples that are twice in the kept steps of an epoch, or missing in one that gradients are averaged in.

    A step is kept if no later generation begins before it. With averaged gradients, all ranks have finished a step if
    one has, even if it was killed before it wrote so.
    """
    starts = {event["generation"]: event["step"] for event in course.begins}
    steps = {(event["generation"], event["step"]) for each in course.processes.values() for event in each.all("steps")}
    counts = defaultdict[int, Counter[int]](Counter)
    for process in course.processes.values():
        own = {(event["generation"], event["step"]) for event in process.all("steps")}
        for event in process.all("fetches"):
            step = event["generation"], event["step"]
            is_kept = all(event["step"] <= starts[later] for later in starts if later > event["generation"])
            if is_kept and step in (own if course.averages_weights else steps):
                counts[event["epoch"]].update(event["samples"])
    most = max((len(members) for members in course.members.values()), default=0)
    for epoch, count in counts.items():
        if twice := [sample for sample, number in count.items() if number > 1]:
            yield f"epoch {epoch} has samples twice: {twice}"
        if not course.averages_weights and epoch < max(counts) and len(count) <= NUM_SAMPLES - most:
            yield f"epoch {epoch} lacks {NUM_SAMPLES - len(count)} samples"


def record(course: Course) -> dict[str, Any]:
    """Return the line of a trial in the results file."""
    waits_s = [(fault.kind, course.wait_s(fault)) for fault in course.begun_s]
    return {
        "seed": course.trial.seed,
        "algorithm": course.trial.algorithm,
        "family": "weights" if course.averages_weights else "gradients",
        "training": "elastic" if course.trial.is_elastic else "plain",
        "nodes": course.trial.nodes,
        "faults": [(kind, wait_s and round(wait_s, 2)) for kind, wait_s in waits_s],
        "ends": [process.how[0] if process.how else "hangs" for process in course.processes.values()],
        "violations": [*violations(course)],
    }


def report(course: Course) -> str:
    """Return what happened in a trial, and what its processes wrote."""
    lines = [str(course.trial), *(f"{fault} at {at_s:.2f}" for fault, at_s in course.begun_s.items())]
    for number, process in course.processes.items():
        lines += [f"process {number}, after step {process.num_steps}:"]
        lines += [str(event) for event in process.events if event["event"] not in ("fetches", "steps")]
        lines += [process.fork.out.with_suffix(".err").read_text(errors="replace")]
    return "\n".join(lines)


def run_seeds(seeds: Iterable[int], path: Path, *, prints: bool = False) -> list[dict[str, Any]]:
    """Run the trials of these seeds that are not in the results file yet; return the results of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    results = {result["seed"]: result for result in known}
    if reason := why_unavailable():
        print(f"No second node, and no link to cut: {reason}")
    remove_stale_namespaces()
    with ExitStack() as stack:
        network = None if reason else stack.enter_context(EmulatedNetwork([0, 1], rank_rate=None, link_rate=None))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults")))
        for seed in tqdm([*seeds], mininterval=1):
            if seed not in results:
                course = run_trial(Trial.drawn(seed, has_nodes=network is not None), network, folder)
                results[seed] = record(course)
                with path.open("a") as file:
                    file.write(json.dumps(results[seed]) + "\n")
                if results[seed]["violations"] or prints:
                    tqdm.write(f"{report(course)}\n{results[seed]}\n  make faults ARGS='--only {seed}'")
    return [results[seed] for seed in seeds]


def summary(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table: by kind of fault, what is averaged, and with or without elastic training."""
    trials, bad = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    waits_s = defaultdict[tuple[str, ...], list[float]](list)
    for result in results:
        about = result["family"], result["training"]
        for kind in {kind for kind, _ in result["faults"]} or {"none"}:
            trials[(kind, *about)] += 1
            bad[(kind, *about)] += bool(result["violations"])
        for kind, seconds in result["faults"]:
            waits_s[(kind, *about)] += [] if seconds is None else [seconds]
    rows = []
    for key in sorted(trials):
        median_s, worst_s = (round(of(waits_s[key]), 1) if waits_s[key] else None for of in (statistics.median, max))
        row = dict(zip(("fault", "averages", "training"), key, strict=True))
        rows.append({**row, "trials": trials[key], "failures": bad[key], "median s": median_s, "worst s": worst_s})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=50, metavar="N", help="number of trials (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first (default: 0)")
    parser.add_argument("--results", type=Path, default=Path("build/faults.jsonl"), help="continue with this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--only", type=int, metavar="SEED", help="run one trial again, and print what happens")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            (result,) = run_seeds([options.only], Path(folder, "results"), prints=True)
        return int(bool(result["violations"]))
    results = run_seeds(range(options.seed, options.seed + options.trials), options.results)
    rows = summary(results)
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    print(text_table([[*rows[0]], *cells], num_left=3))
    bad = [result["seed"] for result in results if result["violations"]]
    ends = Counter(end for result in results for end in result["ends"])
    print(
        f"{len(results)} trials, {len(bad)} failures{f': seeds {bad}' if bad else ''}; processes ended so: {dict(ends)}"
    )
    about = {"command": f"make faults ARGS='--trials {options.trials} --seed {options.seed}'", "timeout_s": TIMEOUT_S}
    write_record(options.json, {**about, "table": rows, "ends of processes": ends, "seeds of failures": bad})
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
