"""Trials of elastic training in the simulation: ranks that die, stop, leave, fail and join, and links that are cut."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

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
QADAM = "qadam"  # made with its optimizer
ALGORITHMS: dict[str, tb.Algorithm | str] = {
    "exact": EXACT,
    "bytegrad": tb.ByteGradAlgorithm(error_feedback=True),
    "topk": tb.TopKAlgorithm(ratio=0.2, momentum=0.5, warmup_steps=4),
    "powersgd": tb.PowerSGDAlgorithm(rank=1, start_step=2, min_rate=1),
    "qadam": QADAM,
    "decentralized": tb.DecentralizedAlgorithm(),
    "low_precision_decentralized": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(inner_steps=3, delay=1),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=2),
}
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
class Joiner:
    """A process that joins: at a time, maybe in place of another process, or with another model than the others."""

    at_s: float
    replaces: int | None = None
    is_stranger: bool = False


@dataclass(frozen=True)
class ElasticTrial:
    """A training of some processes, of which some join later, with some events."""

    seed: int
    size: int
    name: str = "exact"
    joiners: Sequence[Joiner] = ()
    num_steps: int = 15
    batch_size: int = 3
    jitter_s: float = 0.0
    events: Sequence[Event] = ()
    on_evicted: Literal["raise", "join"] = "raise"
    failing: tuple[int, int] = (-1, 0)

    @property
    def algorithm(self) -> tb.Algorithm | str:
        return ALGORITHMS[self.name]

    @property
    def num_processes(self) -> int:
        return self.size + len(self.joiners)

    @property
    def kind(self) -> str:
        """What happens in it, in a word."""
        kinds = {event.kind for event in self.events}
        return "several" if len(kinds) > 1 else next(iter(kinds), "none" if self.failing[0] < 0 else "failed request")

    @property
    def has_healthy_quorum(self) -> bool:
        """Whether those of the first processes to which nothing happens are always more than those that are lost."""
        lost = {event.process for event in self.events if event.kind in ("death", "stop")}
        touched = {event.process for event in self.events}
        is_cut = any(event.kind.startswith("cut") for event in self.events)
        return not is_cut and len({*range(self.size)} - touched) > len(lost)

    @classmethod
    def drawn(cls, seed: int) -> "ElasticTrial":
        """Return the trial of a seed."""
        draw = random.Random(seed)
        size = draw.randrange(1, 6)
        joiners = []
        for _ in range(draw.choice((0, 0, 1, 2))):
            replaces = draw.randrange(size) if draw.random() < 0.3 else None
            joiners.append(Joiner(draw.uniform(0.1, 2), replaces, is_stranger=draw.random() < 0.15))
        processes = range(size + len(joiners))
        events = []
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            kind, process = draw.choice(KINDS), draw.choice(processes)
            links = {(process, draw.choice(processes))}
            if kind == "cut network":
                part = {each for each in processes if draw.random() < 0.5}
                links = {(a, b) for a in processes for b in processes if (a in part) != (b in part)}
            seconds = draw.choice((1.0, 5.0, 20.0, 60.0))
            events.append(Event(kind, process, draw.uniform(0, 2), seconds, frozenset(links)))
        return cls(
            seed,
            size,
            draw.choice([*ALGORITHMS, "exact", "exact"]),
            joiners,
            draw.choice((8, 20)),
            draw.choice((1, 3)),
            draw.choice((0.0, 2e-3, 1e-2)),
            events,
            draw.choice(("raise", "raise", "join")),
        )


def cut_trials() -> Iterator[ElasticTrial]:
    """Yield trials of 2 to 5 ranks: each way to cut the network in two, and each link that is cut one way; for good."""
    for size in range(2, 6):
        ranks = range(size)
        parts = [part for num in range(1, size) for part in itertools.combinations(ranks, num) if 0 in part]
        cuts = [[(a, b) for a in ranks for b in ranks if (a in part) != (b in part)] for part in parts]
        one_way = [[(a, b)] for a in ranks for b in ranks if a != b]
        for links in (*cuts, *one_way):
            kind = "cut network" if len(links) > 1 else "cut link"
            yield ElasticTrial(0, size, events=[Event(kind, -1, 0.55, 60.0, frozenset(links))])


def request_trials() -> Iterator[ElasticTrial]:
    """Yield trials of 2 to 5 ranks, of which one dies and one joins: of each, every request to a mailbox fails once."""
    for size in range(2, 6):
        trial = ElasticTrial(0, size, events=[Event("death", size - 1, 0.55)], joiners=[Joiner(0.8)])
        office = PostOffice()
        run_trial(trial, office)
        for process, count in sorted(office.num_requests.items()):
            for number in range(1, count + 1):
                yield ElasticTrial(0, size, events=trial.events, joiners=trial.joiners, failing=(process, number))


@dataclass
class Log:
    """What happened in a trial.

    Attributes:
        memberships: the members that each rank has seen in a generation.
        steps: of each generation and process, the steps that it has finished there, with their times.
        sent: of each generation and process, the steps that it had finished before, and the bytes of state it sent.
        weights: at the end of each rank that was there at the end.
    """

    memberships: dict[int, set[tuple[Member, ...]]] = field(default_factory=lambda: defaultdict(set))
    steps: dict[int, dict[int, list[tuple[int, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    sent: dict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    num_steps: int = 0


def make_training(
    algorithm: tb.Algorithm | str, num_hidden: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer, tb.Algorithm]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, num_hidden), nn.Linear(num_hidden, 1))
    if isinstance(algorithm, str):
        q_adam = tb.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
        return model, q_adam, tb.QAdamAlgorithm(q_adam, error_feedback=True)
    momentum = 0.0 if isinstance(algorithm, tb.TopKAlgorithm) else 0.5
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum), algorithm


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return (model(X[samples]) - Y[samples]).square().mean()


def run_trial(trial: ElasticTrial, office: PostOffice | None = None) -> list[str]:
    """Run a trial; return what was wrong."""
    simulation = Simulation(trial.num_processes, trial.seed, timeout=TIMEOUT, limit_s=1500)
    simulation.network.jitter_s = trial.jitter_s
    for event in trial.events:
        _schedule(simulation, event)
    replaces = {
        trial.size + n: joiner.replaces for n, joiner in enumerate(trial.joiners) if joiner.replaces is not None
    }
    log, office = Log(), office or PostOffice(replaces, trial.failing)
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
    number, scheduler = rank.number, rank.simulation.scheduler
    is_stranger = False
    if number >= trial.size:
        joiner = trial.joiners[number - trial.size]
        is_stranger = joiner.is_stranger
        _concurrency.sleep(joiner.at_s)
    model, optimizer, algorithm = make_training(trial.algorithm, 4 if is_stranger else 3)
    sampler = Sampler(range(NUM_SAMPLES), seed=1)
    loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), trial.batch_size, sampler=sampler)
    own_steps = -1

    def happens(kind: str) -> bool:
        return any(
            (event.kind, event.process) == (kind, number) and scheduler.now_s > event.at_s for event in trial.events
        )

    def train(run: Run) -> None:
        nonlocal own_steps
        log.memberships[run.generation].add(run.members)
        log.sent[run.generation][number] = own_steps, training.num_state_bytes
        training.num_state_bytes = 0
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
                log.steps[run.generation][number].append((run.step, scheduler.now_s))
                own_steps = run.step
                if run.step >= trial.num_steps:
                    break

    try:
        machine = SimulatedMachine(rank, office, range(trial.size))
        joins_again = trial.on_evicted == "join"
        arguments = model, [optimizer], algorithm, {}, sampler, TIMEOUT
        training = Training(machine, *arguments, joins_again=joins_again)
        if not training.run(train, None):
            return "left"
    except (EvictedError, NoQuorumError, NoProgressError, UserError, TimeoutError, ValueError) as error:
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
    yield from _wrong_memberships(trial, log)
    yield from _wrong_ends(trial, outcomes)
    yield from _wrong_pauses(trial, log)
    if trial.name not in ("decentralized", "low_precision_decentralized", "diloco", "async"):
        yield from _wrong_steps(trial, log)
    if trial.name != "async" and log.weights:
        first = next(iter(log.weights.values()))
        if not all(_are_equal(weights, first) for weights in log.weights.values()):
            yield "weights differ between ranks after the end"


def _wrong_memberships(trial: ElasticTrial, log: Log) -> Iterator[str]:
    voters = {event.process for event in trial.events if event.kind in ("leave", "raise")}  # though they are lost
    for generation, memberships in log.memberships.items():
        if len(memberships) > 1:
            yield f"generation {generation} has the members {memberships}"
        earlier = log.memberships.get(generation - 1)
        if earlier:
            before, after = next(iter(earlier)), next(iter(memberships))
            voted = [member for member in before if member in after or member.port in voters]
            if 2 * len(voted) + (before[0] in voted) <= len(before):
                yield f"generation {generation} has no quorum of the one before"


def _wrong_ends(trial: ElasticTrial, outcomes: Sequence[Outcome[str]]) -> Iterator[str]:
    """Yield the processes that should have trained to the end: to which nothing happens, while they are a quorum."""
    touched = {event.process for event in trial.events}
    if trial.has_healthy_quorum:
        for number in {*range(trial.size)} - touched:
            if outcomes[number].value != "done":
                yield f"process {number} ended as {outcomes[number].value}, though a quorum was healthy"
    for number, joiner in enumerate(trial.joiners, trial.size):
        if (
            joiner.is_stranger
            and number not in touched
            and outcomes[number].value not in ("ValueError", "TimeoutError")
        ):
            yield f"process {number}, which trains something else, ended as {outcomes[number].value}"


def _wrong_pauses(trial: ElasticTrial, log: Log) -> Iterator[str]:
    """Yield pauses of a training that are longer than the timeout and 5 s for each change in them."""
    stopped = {event.process for event in trial.events if event.kind in ("stop", "death")}
    if not trial.has_healthy_quorum:
        return
    for number in {number for steps in log.steps.values() for number in steps} - stopped:
        own = [(s, generation) for generation, steps in log.steps.items() for _, s in steps.get(number, [])]
        for (before_s, before), (after_s, after) in itertools.pairwise(sorted(own)):
            if after_s - before_s > (TIMEOUT.total_seconds() + 5) * max(after - before, 1):
                yield f"process {number} had to wait for {after_s - before_s:.0f} s in {after - before} changes"


def _wrong_steps(trial: ElasticTrial, log: Log) -> Iterator[str]:
    """Yield what is wrong with a gradient algorithm's steps: a zombie's, samples twice, weights, needless bytes."""
    for generation, memberships in log.memberships.items():
        first_s = min((s for steps in log.steps[generation].values() for _, s in steps), default=float("inf"))
        for member in next(iter(memberships)):
            for earlier in range(generation):
                if any(s > first_s for _, s in log.steps[earlier].get(member.port, [])):
                    yield f"{member.id} has finished a step in generation {earlier} after one in {generation}"
        sent = log.sent[generation]
        are_old = {*next(iter(memberships))} <= {*itertools.chain(*log.memberships.get(generation - 1, ()))}
        if are_old and len({num_steps for num_steps, _ in sent.values()}) == 1 and any(num for _, num in sent.values()):
            yield f"equal ranks have sent {sent} in generation {generation}"
    if not log.weights:
        return
    expected, counts = _oracle(trial, log)
    if trial.name == "exact" and not _are_equal(next(iter(log.weights.values())), expected):
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
    finished = {generation: {n for steps in each.values() for n, _ in steps} for generation, each in log.steps.items()}
    for step in range(1, log.num_steps + 1):
        generation = max(each for each, steps in finished.items() if step in steps)
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
