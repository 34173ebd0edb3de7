"""Trials of elastic training in the simulation: ranks that die, stop, leave, fail and join, and links that are cut."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.elastic import Run, Sampler
from torchbagua.elastic.generations import NoProgressError, Training
from torchbagua.elastic.members import EvictedError, Member, NoQuorumError
from torchbagua.testing.simulation import Outcome, Rank, Simulation
from torchbagua.testing.simulation.elastic import PostOffice, SimulatedMachine

TIMEOUT = timedelta(seconds=10)
EXACT = tb.GradientAllReduceAlgorithm(in_rank_order=True)
QADAM = "qadam"
ALGORITHMS = (
    EXACT,
    EXACT,
    tb.ByteGradAlgorithm(error_feedback=True),
    tb.TopKAlgorithm(ratio=0.2, momentum=0.5, warmup_steps=4),
    tb.PowerSGDAlgorithm(rank=1, start_step=2, min_rate=1),
    QADAM,
    tb.DecentralizedAlgorithm(),
    tb.LowPrecisionDecentralizedAlgorithm(),
    tb.DiLoCoAlgorithm(inner_steps=3, delay=1),
    tb.AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=2),
)
KINDS = ("death", "stop", "cut link", "cut network", "leave", "raise")
NUM_SAMPLES = 60
X = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(NUM_SAMPLES, 1, generator=torch.Generator().manual_seed(1))


class UserError(Exception):
    """The user's code raised."""


@dataclass(frozen=True)
class Event:
    """What happens to a process: at a time, for so many seconds, with these links, as pairs of sender and receiver."""

    kind: str
    process: int
    at_s: float
    seconds: float = 0.0
    links: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class ElasticTrial:
    """A training of some processes, of which some join later, with some events."""

    seed: int
    size: int
    joins_s: Sequence[float]
    algorithm: tb.Algorithm | str
    num_steps: int
    batch_size: int
    jitter_s: float
    events: Sequence[Event]

    @classmethod
    def drawn(cls, seed: int) -> "ElasticTrial":
        """Return the trial of a seed."""
        draw = random.Random(seed)
        size = draw.randrange(1, 6)
        joins_s = [draw.uniform(0.2, 4) for _ in range(draw.choice((0, 0, 1, 2)))]
        processes = range(size + len(joins_s))
        events = []
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            kind, process = draw.choice(KINDS), draw.choice(processes)
            links = {(process, draw.choice(processes))}
            if kind == "cut network":
                part = {each for each in processes if draw.random() < 0.5}
                links = {(a, b) for a in processes for b in processes if (a in part) != (b in part)}
            seconds = draw.choice((1.0, 5.0, 20.0, 60.0))
            events.append(Event(kind, process, draw.uniform(0, 4), seconds, frozenset(links)))
        return cls(
            seed,
            size,
            joins_s,
            draw.choice(ALGORITHMS),
            draw.choice((12, 30)),
            draw.choice((1, 3)),
            draw.choice((0.0, 2e-3, 1e-2)),
            events,
        )


@dataclass
class Log:
    """What happened in a trial.

    Attributes:
        memberships: the members that each rank has seen in a generation.
        steps: of each generation, the numbers of the steps that a rank has finished in it.
        weights: at the end of each rank that was there at the end.
    """

    memberships: dict[int, set[tuple[Member, ...]]] = field(default_factory=lambda: defaultdict(set))
    steps: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    num_steps: int = 0


def make_training(algorithm: tb.Algorithm | str) -> tuple[nn.Module, torch.optim.Optimizer, tb.Algorithm]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    if isinstance(algorithm, str):
        q_adam = tb.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
        return model, q_adam, tb.QAdamAlgorithm(q_adam, error_feedback=True)
    momentum = 0.0 if isinstance(algorithm, tb.TopKAlgorithm) else 0.5
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum), algorithm


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return (model(X[samples]) - Y[samples]).square().mean()


def run_trial(trial: ElasticTrial) -> list[str]:
    """Run a trial; return what was wrong."""
    simulation = Simulation(trial.size + len(trial.joins_s), trial.seed, timeout=TIMEOUT, limit_s=900)
    simulation.network.jitter_s = trial.jitter_s
    for event in trial.events:
        _schedule(simulation, event)
    log, office = Log(), PostOffice()
    outcomes = simulation.run(partial(_train, trial=trial, office=office, log=log))
    return [*_violations(trial, simulation, outcomes, log)]


def _schedule(simulation: Simulation, event: Event) -> None:
    scheduler, cut = simulation.scheduler, simulation.network.cut
    if event.kind == "death":
        scheduler.call_at(event.at_s, partial(simulation.kill, event.process))
    elif event.kind == "stop":
        scheduler.call_at(event.at_s, partial(scheduler.pause, event.process, event.seconds))
    elif event.kind.startswith("cut"):
        scheduler.call_at(event.at_s, partial(cut.update, event.links))
        if event.seconds < 60:
            scheduler.call_at(event.at_s + event.seconds, partial(cut.difference_update, event.links))


def _train(rank: Rank, trial: ElasticTrial, office: PostOffice, log: Log) -> str:
    """Train one process; return how it ended."""
    number = rank.number
    if number >= trial.size:
        _concurrency.sleep(trial.joins_s[number - trial.size])
    model, optimizer, algorithm = make_training(trial.algorithm)
    sampler = Sampler(range(NUM_SAMPLES), seed=1)
    loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), trial.batch_size, sampler=sampler)

    def happens(kind: str) -> bool:
        now_s = rank.simulation.scheduler.now_s
        return any((event.kind, event.process) == (kind, number) and now_s > event.at_s for event in trial.events)

    def train(run: Run) -> None:
        log.memberships[run.generation].add(run.members)
        while run.step < trial.num_steps:
            for (samples,) in run.batches(loader):
                if happens("leave"):
                    training.leave_at_boundary()
                if happens("raise"):
                    raise UserError
                _concurrency.sleep(0.1)  # the computation
                optimizer.zero_grad()
                loss_of(run.module, samples).backward()
                optimizer.step()
                log.steps[run.generation].add(run.step)
                if run.step >= trial.num_steps:
                    break

    try:
        machine = SimulatedMachine(rank, office, range(trial.size))
        training = Training(machine, model, [optimizer], algorithm, {}, sampler, TIMEOUT)
        if not training.run(train, None):
            return "left"
    except (EvictedError, NoQuorumError, NoProgressError, UserError, TimeoutError) as error:
        return type(error).__name__
    log.weights[number] = [parameter.detach().clone() for parameter in model.parameters()]
    log.num_steps = max(log.num_steps, training.state.num_steps)
    return "done"


def _violations(
    trial: ElasticTrial, simulation: Simulation, outcomes: Sequence[Outcome[str]], log: Log
) -> Iterator[str]:
    for number, outcome in enumerate(outcomes):
        if outcome.error is not None:
            yield f"process {number} raised {outcome.error!r}"
        threads = [name for name in outcome.threads if "request" not in name]  # which a mailbox never answers
        if threads and number not in simulation.dead:
            yield f"process {number} leaves {threads} behind"
    for generation, memberships in log.memberships.items():
        if len(memberships) > 1:
            yield f"generation {generation} has the members {memberships}"
    if log.weights and not isinstance(trial.algorithm, tb.AsyncModelAverageAlgorithm):
        first = next(iter(log.weights.values()))
        if not all(_are_equal(weights, first) for weights in log.weights.values()):
            yield "weights differ between ranks after the end"
    if log.weights and (trial.algorithm == QADAM or not trial.algorithm.averages_weights):
        expected, counts = _oracle(trial, log)
        if trial.algorithm == EXACT and not _are_equal(first, expected):
            yield "weights differ from those of one process that trains the kept steps"
        for epoch, count in counts.items():
            size = max(len(members) for memberships in log.memberships.values() for members in memberships)
            if sum(count.values()) - len(count) >= size:
                yield f"epoch {epoch} has samples twice: {[sample for sample, num in count.items() if num > 1]}"


def _are_equal(weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, weights, others))


def _oracle(trial: ElasticTrial, log: Log) -> tuple[list[torch.Tensor], dict[int, Counter[int]]]:
    """Train the kept steps in one process: each step in the last generation that has finished it.

    Return the weights, and how often each sample of an epoch was trained.
    """
    model, optimizer, _ = make_training(EXACT)
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    samplers: list[Sampler] = []
    batches: list[Iterator[list[int]]] = []
    current, state = -1, Sampler(range(NUM_SAMPLES), seed=1).state_dict()
    for step in range(1, log.num_steps + 1):
        generation = max(each for each, steps in log.steps.items() if step in steps)
        if generation != current:
            current = generation
            members = next(iter(log.memberships[generation]))
            samplers = [Sampler(range(NUM_SAMPLES), seed=1) for _ in members]
            for number, sampler in enumerate(samplers):
                sampler.load_state_dict(state)
                sampler.begin(number, len(members))
            batches = [_batches(sampler, trial.batch_size) for sampler in samplers]
        sums: list[Any] = [0.0] * len(list(model.parameters()))
        for number, own in enumerate(batches):
            samples = next(own)
            counts[samplers[number].epoch].update(samples)
            optimizer.zero_grad()
            loss_of(model, torch.tensor(samples)).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            sums = gradients if number == 0 else [total + own for total, own in zip(sums, gradients, strict=True)]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total / torch.tensor(float(len(batches)))
        optimizer.step()
        for sampler in samplers:
            sampler.commit()
        state = samplers[0].state_dict()
    return list(model.parameters()), counts


def _batches(sampler: Sampler, batch_size: int) -> Iterator[list[int]]:
    while True:
        order = list(sampler)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            sampler.fetch(len(batch))
            yield batch
        sampler.end_epoch()
