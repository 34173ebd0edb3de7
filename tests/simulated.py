"""Training runs in a simulated network, with a fault given by the seed, and what must hold after each of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

import torchbagua as tb
from torchbagua.simulation.ddp import SimulatedDdp
from torchbagua.simulation.run import Outcome, Rank, Simulation

STEPS = 5
TIMEOUT = timedelta(seconds=10)
# A rank waits for its peers, and then in `detach` or in a further agreement for the consequences.
MOST_TIMEOUTS = 3

ALGORITHMS: dict[str, Callable[[], tb.Algorithm]] = {
    "gradient_allreduce": lambda: tb.GradientAllReduceAlgorithm(in_rank_order=True),
    "bytegrad": tb.ByteGradAlgorithm,
    "bytegrad_feedback": lambda: tb.ByteGradAlgorithm(error_feedback=True),
    "4_bits": tb.CompressedAllReduceAlgorithm,
    "powersgd": lambda: tb.PowerSGDAlgorithm(rank=1, start_step=1, min_rate=1),
    "topk": lambda: tb.TopKAlgorithm(ratio=0.25),
    "all": tb.DecentralizedAlgorithm,
    "shift_one": lambda: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low_precision": tb.LowPrecisionDecentralizedAlgorithm,
    "diloco": lambda: tb.DiLoCoAlgorithm(2),
    "fragments": lambda: tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    "async": lambda: tb.AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=1),
}
FAULTS = ("none", "death", "cut link", "long stall", "short stall", "slow link", "error", "early end", "late start")


class UserError(Exception):
    """The user's code raised."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: one of FAULTS.
        rank: the rank.
        peer: the other end of a link.
        at_s: when, in virtual time.
        at_step: the step in which the user's code of the rank does something else.
    """

    kind: str
    rank: int
    peer: int
    at_s: float
    at_step: int


@dataclass(frozen=True)
class Report:
    """A run, and what was wrong with it."""

    algorithm: str
    fault: Fault
    seconds: float
    digest: str
    violations: list[str]


def run_training(algorithm: str, kind: str, size: int, seed: int) -> Report:
    """Train `size` ranks with a fault of this kind, and check the result."""
    draw = random.Random(seed)
    rank = draw.randrange(size)
    peer = (rank + 1 + draw.randrange(size - 1)) % size
    fault = Fault(kind, rank, peer, draw.uniform(0, 0.12), draw.randrange(STEPS))
    simulation = Simulation(size, seed, timeout=TIMEOUT, limit_s=10 * TIMEOUT.total_seconds())
    network = simulation.network
    if kind == "death":
        simulation.kill_at(fault.at_s, rank)
    elif kind == "cut link":
        simulation.scheduler.call_at(fault.at_s, lambda: network.cut.add((rank, peer)))
    elif kind == "slow link":
        simulation.scheduler.call_at(fault.at_s, lambda: network.rates.__setitem__(rank, 1e4))
    outcomes = simulation.run(lambda own: train(own, algorithm, fault))
    violations = list(find_violations(simulation, outcomes, fault))
    return Report(algorithm, fault, simulation.scheduler.now_s, simulation.scheduler.digest.hexdigest(), violations)


def train(rank: Rank, algorithm: str, fault: Fault) -> dict[str, torch.Tensor]:
    """Train one rank, and return its weights."""
    has_fault = rank.number == fault.rank
    if has_fault and fault.kind == "late start":
        rank.compute(TIMEOUT.total_seconds() / 2)
    module = build_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    description = ALGORITHMS[algorithm]()
    if description.averages_weights:
        attachment = tb.attach(module, optimizer, description, process_group=rank.group())
        close = attachment.detach
    else:
        runner = description.reify(rank.group(), optimizer=optimizer)
        SimulatedDdp(module, runner, 100, lambda parameter: 1e-3)
        close = runner.close
    data = torch.Generator().manual_seed(rank.number)
    for step in range(STEPS):
        if has_fault and step == fault.at_step:
            if fault.kind == "error":
                raise UserError
            if fault.kind == "early end":
                break
            if fault.kind in ("long stall", "short stall"):
                rank.compute(TIMEOUT.total_seconds() * (2 if fault.kind == "long stall" else 0.5))
        rank.compute(0.005)
        module(torch.randn(3, 8, generator=data)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    close()
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def build_module() -> torch.nn.Module:
    """Return the same module on all ranks, without torch's global generator, which ranks as threads share."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.3, 0.3, generator=draw)
    return module


def find_violations(
    simulation: Simulation, outcomes: list[Outcome[dict[str, torch.Tensor]]], fault: Fault
) -> list[str]:
    """Return what must not be."""
    found = []
    survivors = {rank: outcome for rank, outcome in enumerate(outcomes) if rank not in simulation.dead}
    limit_s = 0.2 + MOST_TIMEOUTS * TIMEOUT.total_seconds()
    if simulation.scheduler.now_s > limit_s:
        found.append(f"the last rank ended after {simulation.scheduler.now_s:.1f} s, allowed: {limit_s} s")
    values = [outcome.value for outcome in survivors.values() if outcome.value is not None]
    if fault.kind in ("none", "short stall", "late start", "slow link"):
        found += [f"rank {rank} raised {outcome.error!r}" for rank, outcome in survivors.items() if outcome.error]
        for name in values[0] if values else ():
            if not all(torch.equal(value[name], values[0][name]) for value in values):
                found.append(f"{name} differs between ranks after the end")
    for rank, outcome in survivors.items():
        if outcome.error is None or isinstance(outcome.error, UserError):
            continue
        message = str(outcome.error)
        if not isinstance(outcome.error, tb.CommunicationError | TimeoutError | RuntimeError):
            found.append(f"rank {rank} raised {outcome.error!r}")
        elif f"rank {rank}" not in message and "ranks" not in message:
            found.append(f"the error of rank {rank} names no rank: {message}")
        elif "ranks []" in message:
            found.append(f"the error of rank {rank} names no peer: {message}")
    return found
