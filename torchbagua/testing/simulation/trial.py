"""Trials: a training run of some ranks in a simulation, of which the seed determines everything."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.testing.simulation.cluster import Cluster
from torchbagua.testing.simulation.faults import FAULTS, FROM_THE_START, HARMLESS, PLACES, Fault, UserCode, UserError
from torchbagua.testing.simulation.program import MakeAlgorithm, MakeOptimizer, Program, Record, Train, sgd, train
from torchbagua.testing.simulation.residuals import lost_gradients
from torchbagua.testing.simulation.run import Outcome, Rank, Simulation
from torchbagua.testing.simulation.scheduler import Deadlock
from torchbagua.transport.store_requests import REQUEST_THREAD

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


# A whole run without faults takes less. A rank that notices the failure of another one at once does so in this time.
AT_ONCE_S = 3.0
# How many timeouts a run may last longer.
_HARMLESS_TIMEOUTS = {
    "short stall": 0.5,
    "slow link": 3,
    "late start": 0.5,
    "late attach": 2,
    "slow store": 2,
    "late store": 0.5,
}

_RANKS = r"ranks? \d[\d, and-]*"
_OWN = r"(?:rank {rank}|rank \d+ \(global rank {rank}\))"
_NAMED = (
    rf"torchbagua: .+ failed on {_OWN} (?:receiving from|sending to|connecting to) rank \d+",
    rf"torchbagua: ranks are out of step in .+: ranks disagree on .+: {_RANKS} ha\w+ \d+, {_RANKS} ha\w+ \d+",
    rf"torchbagua: ranks are out of step in .+\. R{_RANKS[1:]} (?:is|are) in .+, {_RANKS} in .+\. Every",
    r"torchbagua: ranks are out of step: rank \d+ .+; rank \d+ .+ optimizer steps",
    rf"torchbagua: ranks are out of step: rank \d+ .+ has ended .+ failed on {_OWN} .+ rank \d+",
    r"torchbagua: timed out after .+ s waiting for ranks \[\d.*\] of \d+",
    rf"torchbagua: the \w+ group of ranks .+ could not be opened on {_OWN} .+ ranks \[\d.*\]",
    rf"torchbagua: opening private groups on all ranks .+ failed on {_OWN}, waiting for rank \d+",
    rf"torchbagua: opening private groups on all ranks .+ failed on {_OWN}: rank \d+ has left",
    r"torchbagua: weights cannot be averaged: rank \d+ has left",
    rf"torchbagua: ranks have stopped averaging for different reasons: {_RANKS} for \w+, {_RANKS} for \w+",
    rf"torchbagua: ranks have not loaded the same weights since attach: ranks disagree on .+: {_RANKS} .+, {_RANKS} ",
)
_CHANGE_WEIGHTS = ("skipped step", "other state")
_OUT_OF_STEP = ("early end", "skipped step", "other call")
_FAILED_STORES = {
    "lost store": "the store has closed the connection",
    "silent store": "the store of the process group did not answer",
}


def find_violations(
    trial: "Trial", simulation: Simulation, outcomes: Sequence[Outcome[None]], records: Sequence[Record]
) -> list[str]:
    """Return what was wrong in a run."""
    check = _Check(trial, simulation, outcomes, records)
    return [
        *check.ends(),
        *check.errors(),
        *check.participation(),
        *check.lengths(),
        *check.replicas(),
        *check.residuals(),
        *check.remains(),
    ]


class _Check:
    def __init__(
        self, trial: "Trial", simulation: Simulation, outcomes: Sequence[Outcome[None]], records: Sequence[Record]
    ) -> None:
        self.trial = trial
        has_happened = simulation.fault_s is not None or trial.fault.kind in FROM_THE_START
        self.kind = trial.fault.kind if has_happened else "none"
        self.simulation = simulation
        self.outcomes = outcomes
        self.records = records
        self.algorithm = trial.subject.algorithm()
        self.is_async = isinstance(self.algorithm, tb.AsyncModelAverageAlgorithm)
        self.may_differ = self.kind in _CHANGE_WEIGHTS and not self.algorithm.averages_weights
        self.survivors = [rank for rank in range(simulation.size) if rank not in simulation.dead]
        self.all_ended_well = all(outcome.is_done and outcome.error is None for outcome in outcomes)

    def ends(self) -> Iterator[str]:
        """Every rank ends within the time that the documentation promises."""
        for rank in self.survivors:
            record, outcome = self.records[rank], self.outcomes[rank]
            ended_s = outcome.ended_s if record.failed_s is None else record.failed_s
            limit_s = self.limit_s(rank)
            if ended_s > limit_s:
                yield f"rank {rank} ended after {ended_s:.2f} s, allowed: {limit_s:.2f} s"

    def limit_s(self, rank: int) -> float:
        """Return the latest time at which a rank ends."""
        timeout_s = self.simulation.timeout.total_seconds()
        program = self.trial.program
        evaluation_s = program.evaluation_s if program.evaluates_at is not None else 0
        if self.kind in HARMLESS:
            return AT_ONCE_S + _HARMLESS_TIMEOUTS.get(self.kind, 0) * timeout_s + evaluation_s
        fault_s = self.simulation.fault_s
        assert fault_s is not None, "a fatal fault has happened"
        is_attached = all(record.attached_s is not None and record.attached_s <= fault_s for record in self.records)
        num_timeouts = 0 if is_attached else 1 if self.kind == "silent store" else 2
        if self.kind == "cut link":
            num_timeouts += 1
        elif self.kind == "other call" and not self.algorithm.averages_weights:
            num_timeouts += 1  # one of the calls is not collective
        elif self.kind in _OUT_OF_STEP and self._averages_within_nodes():
            num_timeouts += 1  # a rank waits for a gradient within its node, and the others wait for the round
        elif self.kind == "long stall":
            num_timeouts += 2 if rank == self.trial.fault.rank else 1
        if self.kind == "error" and rank == self.trial.fault.rank:
            return fault_s + AT_ONCE_S
        return fault_s + AT_ONCE_S + num_timeouts * timeout_s + evaluation_s

    def _averages_within_nodes(self) -> bool:
        has_mates = len(set(self.simulation.cluster.nodes)) < self.simulation.size
        return has_mates and isinstance(self.algorithm, tb.DiLoCoAlgorithm | tb.LocalSGDAlgorithm)

    def errors(self) -> Iterator[str]:
        """Without a fault that must fail, no rank fails. Each error names the operation, the rank and a peer."""
        for rank in self.survivors:
            error = self.outcomes[rank].error
            if error is None:
                continue
            if self.kind in HARMLESS or self._is_allowed_if_async():
                yield f"rank {rank} raised {error!r}"
            elif not isinstance(error, UserError) and not self._names_ranks(rank, error):
                yield f"the error of rank {rank} does not name operation, rank and peer: {error!r}"
        texts = [str(self.outcomes[rank].error) for rank in self.survivors if self.outcomes[rank].error is not None]
        dead = self.trial.fault.rank
        names_dead = re.compile(rf"rank {dead}\b|ranks \[[^\]]*\b{dead}\b")
        if self.kind == "death" and texts and not any(map(names_dead.search, texts)):
            yield f"no error names rank {dead}, which has died: {texts}"

    def _is_allowed_if_async(self) -> bool:
        """Return whether ranks average asynchronously, and differ only in steps after the warm-up, as they may."""
        step, program = self.trial.fault.step, self.trial.program
        if not self.is_async or step == 0:
            return False
        calls = [call for call in (program.loads_at, program.evaluates_at) if call is not None]
        misses_none = all(call < step for call in calls)
        return self.kind in ("skipped step", "other state") or (self.kind == "early end" and misses_none)

    def participation(self) -> Iterator[str]:
        """No rank finishes without a rank that has left, or has not stepped, unless the algorithm is asynchronous."""
        # Gradients of sharded modules are averaged by torch's hooks, which do not know the optimizer.
        if self.kind == "skipped step" and not self.is_async and self.trial.subject.train is train:
            for rank in self.survivors:
                if self.outcomes[rank].error is None:
                    yield f"rank {rank} has finished, although rank {self.trial.fault.rank} has skipped a step"
        if self.kind not in ("death", "error", "early end"):
            return
        if self.is_async:
            return
        culprit = self.trial.fault.rank
        num_steps = self.records[culprit].num_steps
        # A gradient of the step in which it has left may have been sent.
        allowed = num_steps + (0 if self.algorithm.averages_weights else 1)
        for rank in self.survivors:
            if rank != culprit and self.outcomes[rank].error is None and self.records[rank].num_steps > allowed:
                yield f"rank {rank} has finished, although rank {culprit} has left after {num_steps} steps"

    def _names_ranks(self, rank: int, error: BaseException) -> bool:
        text = str(error)
        if self.kind in _FAILED_STORES and _FAILED_STORES[self.kind] in text:
            return True
        if self.kind == "failed operation" and f" of rank {rank}" in text:
            return True  # it has failed on this rank
        return "the group is closed" not in text and any(
            re.search(pattern.format(rank=rank), text, re.DOTALL) for pattern in _NAMED
        )

    def lengths(self) -> Iterator[str]:
        """No message has another length than its receive."""
        yield from self.simulation.network.wrong_lengths

    def replicas(self) -> Iterator[str]:
        """Ranks have the same weights: after every step of a gradient algorithm, and after the end."""
        if not self.algorithm.averages_weights:
            num_steps = max(len(record.weights) for record in self.records)
            for step in range(num_steps):
                weights = [record.weights[step] for record in self.records if step < len(record.weights)]
                if not _are_equal(weights) and not self.may_differ:
                    yield f"weights differ between ranks after step {step}"
                    return
        if self.all_ended_well and not self.may_differ:
            results = [record.result for record in self.records if record.result is not None]
            if not _are_equal(results):
                yield "weights differ between ranks after the end"
            program = self.trial.program
            keeps_loaded = program.loads_at is not None and program.freezes and program.num_steps > 0
            if keeps_loaded and self.kind != "other state":  # which has another learning rate
                for record in self.records:
                    assert record.result is not None
                    assert record.loaded is not None
                    # A round in flight, or the last mean, rounds sums of equal weights.
                    if float((record.result - record.loaded).abs().max()) > 1e-6:
                        yield "the weights that were loaded have changed"

    def residuals(self) -> Iterator[str]:
        """Error feedback loses nothing, and counts nothing twice."""
        if self.all_ended_well and self.kind not in (*_CHANGE_WEIGHTS, "early end"):
            lost = lost_gradients([record.sums for record in self.records])
            if lost is not None:
                yield lost

    def remains(self) -> Iterator[str]:
        """A rank that has detached leaves no thread and no hook behind, and no message, if all have.

        A request that the store never answers keeps its thread.
        """
        for rank, (record, outcome) in enumerate(zip(self.records, self.outcomes, strict=True)):
            threads = [name for name in outcome.threads if self.kind != "silent store" or name != REQUEST_THREAD]
            for left in (*record.left, *(f"the thread {name!r}" for name in threads)):
                yield f"rank {rank} leaves {left} behind"
        for name in self.simulation.foreign_threads:
            yield f"a rank leaves the thread {name!r} behind, which it has not started with torchbagua._concurrency"
        # Ranks with a gradient algorithm only warn if their last meeting fails.
        may_warn = not self.algorithm.averages_weights and self.kind in ("failed operation", "long stall", "cut link")
        if self.all_ended_well and not may_warn:
            for channel in self.simulation.network.channels.values():
                for sender, receiver, tag in channel.unread():
                    yield f"rank {receiver} has not read a message of rank {sender} with tag {tag}"


def _are_equal(weights: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(weight, weights[0]) for weight in weights)
