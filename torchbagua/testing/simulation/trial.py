"""Trials: a training run of some ranks in a simulation, of which the seed determines everything."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.testing.simulation.cluster import Cluster
from torchbagua.testing.simulation.faults import FAULTS, PLACES, Fault, UserCode
from torchbagua.testing.simulation.invariants import find_violations
from torchbagua.testing.simulation.program import MakeAlgorithm, MakeOptimizer, Program, Record, Train, sgd, train
from torchbagua.testing.simulation.run import Outcome, Rank, Simulation
from torchbagua.testing.simulation.scheduler import Deadlock

TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Subject:
    """What trials test: an algorithm, with its optimizer.

    Attributes:
        make: returns it, given the optimizer. It is also called with an optimizer of one other parameter.
        make_optimizer: returns the optimizer of a list of parameters.
        sizes: the numbers of ranks that it supports.
        train: the training of a rank.
        faults: the kinds of faults that it trains with.

    Raises:
        ValueError: `sizes` or `faults` do not fit.
    """

    make: MakeAlgorithm
    make_optimizer: MakeOptimizer = sgd
    sizes: tuple[int, ...] = (2, 3, 4)
    train: Train = train
    faults: tuple[str, ...] = FAULTS

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not self.sizes or not all(isinstance(size, int) and size > 1 for size in self.sizes):
            raise ValueError(f"Subject: sizes must be numbers of ranks of at least 2, got {self.sizes!r}")
        if not self.faults or not set(self.faults) <= set(FAULTS):
            raise ValueError(f"Subject: faults must be some of {list(FAULTS)}, got {self.faults!r}")

    def algorithm(self) -> tb.Algorithm:
        """Return the algorithm, for an optimizer of one parameter. Raises TypeError if `make` returns none."""
        algorithm: object = self.make(self.make_optimizer([torch.nn.Parameter(torch.zeros(1))]))
        if not isinstance(algorithm, tb.Algorithm):
            raise TypeError(f"Subject: make must return a torchbagua.Algorithm, got {algorithm!r}")
        return algorithm


@dataclass(frozen=True)
class Trial:
    """A training run, with at most one fault.

    Attributes:
        subject: the algorithm.
        seed: determines the order of all events.
        cluster: the machines.
        program: the loop.
        fault: the fault.
        jitter_s: messages take up to this much longer.
        skew: rank r computes `1 + skew * r` times as long as rank 0.
        lingers: whether the process of a rank that raises lives on for a while.
    """

    subject: Subject
    seed: int
    cluster: Cluster
    program: Program
    fault: Fault
    jitter_s: float = 0.0
    skew: float = 0.0
    lingers: bool = False


@dataclass(frozen=True)
class Report:
    """The result of a trial.

    Attributes:
        trial: the trial.
        violations: what must not have happened.
        outcomes: of each rank.
        records: of each rank.
        ended_s: the virtual time at which the last rank ended.
        num_turns: the turns of the scheduler.
        digest: a hash of all events.
    """

    trial: Trial
    violations: list[str]
    outcomes: Sequence[Outcome[None]]
    records: Sequence[Record]
    ended_s: float
    num_turns: int
    digest: str


def draw_trial(subject: Subject, seed: int, kind: str | None = None) -> Trial:
    """Return the trial of a seed. The fault is of this kind if the subject trains with it, else of a drawn kind."""
    if not isinstance(seed, int):
        raise TypeError(f"draw_trial: seed must be an int, got {seed!r}")
    if kind is not None and kind not in FAULTS:
        raise ValueError(f"draw_trial: kind must be one of {list(FAULTS)}, got {kind!r}")
    draw = random.Random(seed)
    size = draw.choice(subject.sizes)
    nodes = (0, 0, 1, 1) if size == 4 and draw.random() < 0.5 else tuple(range(size))
    cluster = Cluster(nodes, rate=draw.choice((1e6, 25e6)), latency_s=draw.choice((1e-4, 2e-3)))
    algorithm = subject.algorithm()
    trial = Trial(
        subject,
        seed,
        cluster,
        Program.drawn(draw, algorithm),
        Fault(),
        jitter_s=draw.choice((0.0, 0.0, 2e-3, 1e-2)),
        skew=draw.choice((0.0, 0.3)),
        lingers=draw.random() < 0.5,
    )
    if len(set(nodes)) < size:  # some algorithms have DDP average gradients within nodes
        trial = replace(trial, program=replace(trial.program, wraps=True, has_unused=False))
    num_turns = draw.choice((50, 200, 400, 800)) * size // 2
    evaluates = trial.program.evaluates_at is not None
    places = [place for place in PLACES if evaluates or place != "averaged_weights"]
    fault = Fault.drawn(
        draw,
        kind if kind in subject.faults else draw.choice(subject.faults),
        size,
        num_turns,
        max(1, trial.program.num_steps),
        places,
    )
    if fault.kind == "overflow":
        trial = replace(trial, program=replace(trial.program, has_scaler=True))
    if fault.place == "averaged_weights" and trial.program.evaluates_at is not None:
        fault = replace(fault, step=trial.program.evaluates_at)
    return replace(trial, fault=fault)


class Violation(AssertionError):
    """A trial of `check` in which something happened that must not happen."""


def check(subject: Subject, seeds: Iterable[int], progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
    """Run the trials of these seeds.

    In each, two to four ranks train a small module, with a fault or without one; see `Program` and `Fault`.

    Args:
        subject: what is tested.
        seeds: a trial takes about 50 ms.
        progress: wraps the iteration over the seeds, for instance `tqdm.tqdm`.

    Raises:
        Violation: what was wrong in the first trial in which anything was. Its cause is the first error of a rank that
            is not one of communication.
    """
    if not isinstance(subject, Subject):
        raise TypeError(f"check: subject must be a Subject, got {subject!r}; write Subject(lambda optimizer: ...)")
    for seed in progress(seeds):
        trial = draw_trial(subject, seed)
        errors: list[BaseException | None] = []
        try:
            report = run_trial(trial)
            violations, errors = report.violations, [outcome.error for outcome in report.outcomes]
        except Deadlock as error:
            violations = [str(error)]
        if violations:
            # Errors of communication follow from the error of another rank.
            cause = next((error for error in errors if error and not isinstance(error, tb.CommunicationError)), None)
            raise Violation(
                f"seed {seed}, with the fault {trial.fault.kind!r}: {'; '.join(violations)}. "
                f"run_trial(draw_trial(subject, {seed})) repeats it"
            ) from cause


def run_trial(trial: Trial, simulation: Simulation | None = None) -> Report:
    """Run a trial, in a new simulation or in one that `simulate` has returned, and check what must hold.

    Raises:
        Deadlock: a rank never ends.
    """
    simulation = simulation or simulate(trial)
    records = [Record() for _ in range(simulation.size)]

    def body(rank: Rank) -> None:
        user = UserCode(trial.fault, rank)
        user.start()
        record = records[rank.number]
        try:
            subject = trial.subject
            subject.train(rank, trial.program, user, record, subject.make_optimizer, subject.make)
        except Exception:
            record.failed_s = simulation.scheduler.now_s
            if trial.lingers:
                _concurrency.sleep(3 * TIMEOUT.total_seconds())
            raise

    with torch.random.fork_rng(devices=[]):  # ranks share torch's generator, and the caller keeps its state
        torch.manual_seed(trial.seed)
        outcomes = simulation.run(body)
    scheduler = simulation.scheduler
    return Report(
        trial,
        find_violations(trial, simulation, outcomes, records),
        outcomes,
        records,
        scheduler.now_s,
        scheduler.num_turns,
        scheduler.digest.hexdigest(),
    )


def simulate(trial: Trial) -> Simulation:
    """Return the simulation in which a trial runs."""
    simulation = Simulation(trial.cluster, trial.seed, timeout=TIMEOUT, limit_s=10 * TIMEOUT.total_seconds())
    simulation.network.jitter_s = trial.jitter_s
    simulation.processors.slowness = [1 + trial.skew * rank for rank in range(simulation.size)]
    trial.fault.prepare(simulation)
    return simulation
