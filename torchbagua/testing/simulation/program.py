"""The training program that every rank of a trial runs, and the record that it leaves, even if its rank dies."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.fsdp.collectives import shard_codecs
from torchbagua.testing.simulation.faults import UserCode
from torchbagua.testing.simulation.residuals import GradientSums
from torchbagua.testing.simulation.run import Rank
from torchbagua.testing.simulation.shards import SimulatedShards

BUCKET_ELEMENTS = 100
"""The size of DDP's buckets: the module has several."""

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
MakeAlgorithm = Callable[[torch.optim.Optimizer], tb.Algorithm]
Train = Callable[["Rank", "Program", UserCode, "Record", MakeOptimizer, MakeAlgorithm], None]


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, with a state: the momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Program:
    """The loop, the same on all ranks.

    Attributes:
        num_steps: the number of training steps.
        num_backwards: the backward passes of a step; of the first step, after which DDP rebuilds its buckets, one.
        synchronizes_all: whether DDP averages the gradients of all of them, or only of the last one.
        has_unused: whether steps with an even number do not use one of the layers (`find_unused_parameters`).
        has_scaler: whether the loop uses a GradScaler.
        wraps: whether the module is wrapped in DistributedDataParallel; a gradient algorithm needs it.
        evaluates_at: the step after which the loop evaluates the mean of the ranks' weights; None for never.
        saves_at: the step after which the loop takes the state of the attachment; None for never.
        loads_at: the step before which all ranks load other weights; None for never.
        freezes: whether the learning rate is 0 from then on, so that the loaded weights must stay.
        collects_at: the step before which Python collects garbage, which it never does otherwise in a simulation.
        evaluation_s: the seconds for which the loop evaluates.
        quantizes_weights: whether the weights of a sharded module are gathered in the algorithm's codec.
        backward_s: the seconds in which the gradient of a parameter is computed.
        forward_s: the seconds of a forward.
    """

    num_steps: int = 5
    num_backwards: int = 1
    synchronizes_all: bool = False
    has_unused: bool = False
    has_scaler: bool = False
    wraps: bool = True
    evaluates_at: int | None = None
    saves_at: int | None = None
    loads_at: int | None = None
    freezes: bool = False
    collects_at: int | None = None
    evaluation_s: float = 0.0
    quantizes_weights: bool = False
    backward_s: float = 1e-3
    forward_s: float = 5e-3

    @classmethod
    def drawn(cls, draw: random.Random, algorithm: tb.Algorithm) -> "Program":
        """Draw a program that the algorithm supports."""
        averages_weights = algorithm.averages_weights
        return cls(
            num_steps=draw.choice((5,) * 15 + (0,)),
            num_backwards=draw.choice((1, 1, 2)),
            synchronizes_all=draw.random() < 0.3,
            has_unused=draw.random() < 0.2,
            has_scaler=draw.random() < 0.3,
            wraps=not averages_weights or draw.random() < 0.5,
            evaluates_at=draw.choice((None, 1, 3)),
            saves_at=draw.choice((None, 2)),
            loads_at=draw.choice((None, 2, 3, 4)) if averages_weights else None,
            freezes=draw.random() < 0.7,
            collects_at=draw.choice((None, None, None, 2)),
            evaluation_s=draw.choice((0.0, 0.0, 5.0)),
            quantizes_weights=draw.random() < 0.5,
            backward_s=draw.choice((1e-4, 1e-3, 3e-3)),
            forward_s=draw.choice((5e-4, 5e-3)),
        )


@dataclass
class Record:
    """What is known of a rank's run.

    Attributes:
        attached_s: when `attach` returned; None before.
        failed_s: when an exception left the program; None if none did.
        num_steps: the number of steps that the rank has ended.
        weights: after each step, the weights; empty with a sharded module.
        loaded: the weights that the program loads.
        result: the weights after `detach`; None before.
        left: the hooks that `detach` left behind.
        sums: the sums of gradients, and the residuals at the end.
    """

    attached_s: float | None = None
    failed_s: float | None = None
    num_steps: int = 0
    weights: list[torch.Tensor] = field(default_factory=list)
    loaded: torch.Tensor | None = None
    result: torch.Tensor | None = None
    left: list[str] = field(default_factory=list)
    sums: GradientSums = field(default_factory=GradientSums)


class ThreeLayers(torch.nn.Module):
    """Linear layers, of which a forward may leave out the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        draw = torch.Generator().manual_seed(0)  # not torch's global generator, which ranks as threads share
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.3, 0.3, generator=draw)

    def forward(self, x: torch.Tensor, uses_middle: bool = True) -> torch.Tensor:
        """Return the output for inputs [B, 8]."""
        hidden = torch.relu(self.first(x))
        output: torch.Tensor = self.last(self.middle(hidden) if uses_middle else hidden)
        return output


def train(
    rank: Rank, program: Program, user: UserCode, record: Record, make_optimizer: MakeOptimizer, make: MakeAlgorithm
) -> None:
    """Train one rank, and write to `record` what happens."""
    network = ThreeLayers()
    loaded = {name: weight + 0.1 for name, weight in network.state_dict().items()}
    record.loaded = torch.cat([weight.flatten() for weight in loaded.values()])
    hooks = _num_hooks(network)
    optimizer = make_optimizer(list(network.parameters()))
    hooks_of_optimizer = _num_hooks(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=program.has_scaler)
    model: torch.nn.Module = network
    if program.wraps:
        model = rank.ddp(
            network,
            backward_s=lambda parameter: program.backward_s,
            bucket_cap_mb=BUCKET_ELEMENTS * 4 / 2**20,
            find_unused_parameters=program.has_unused,
        )
    record.sums.watch(network, optimizer, scaler)

    def attach() -> tb.Attachment:
        own_scaler = scaler if program.has_scaler else None
        return tb.attach(model, optimizer, make(optimizer), process_group=rank.group(), grad_scaler=own_scaler)

    with user.attach_with_retries(attach) as attachment:
        record.attached_s = rank.simulation.scheduler.now_s
        data = torch.Generator().manual_seed(rank.number)
        for step in range(program.num_steps):
            if user.leaves(step):
                break
            if step == program.collects_at and rank.number == 0:  # once, since ranks share the process
                gc.collect()
            if step == program.loads_at:
                network.load_state_dict(loaded)
                if program.freezes:
                    optimizer.param_groups[0]["lr"] = 0.0
            num_backwards = program.num_backwards if step else 1
            for backward in range(num_backwards):
                user.at("forward", step)
                rank.compute(program.forward_s)
                is_last = backward + 1 == num_backwards
                with _synchronizing(model, program.synchronizes_all or is_last):
                    output = model(torch.randn(3, 8, generator=data), step % 2 or not program.has_unused)
                    loss = user.loss(output.square().sum(), step)
                    record.sums.begin(scaler)
                    scaler.scale(loss).backward()
            user.at("step", step)
            user.change_state(optimizer, attachment, step)
            if not user.skips_step(step):
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            record.sums.clear()
            record.weights.append(_flat(network))
            record.num_steps += 1
            if step == program.saves_at:
                attachment.state_dict()
            if step == program.evaluates_at:
                with attachment.averaged_weights():
                    user.at("averaged_weights", step)
                    _concurrency.sleep(program.evaluation_s)
        # Of a weight algorithm, `state_dict` would wait for a round in flight.
        if isinstance(optimizer, torch.optim.SGD) and not attachment.algorithm.averages_weights:
            record.sums.take_residuals(attachment.state_dict())
    record.result = _flat(network)
    record.sums.close()
    record.left = [
        *([] if _num_hooks(network) == hooks else ["a hook of the module"]),
        *([] if _num_hooks(optimizer) == hooks_of_optimizer else ["a hook of the optimizer"]),
    ]


def train_sharded(
    rank: Rank, program: Program, user: UserCode, record: Record, make_optimizer: MakeOptimizer, make: MakeAlgorithm
) -> None:
    """Train one rank with a sharded module, and write to `record` what happens."""
    network = ThreeLayers()
    parts = [network.first, network.middle, network.last]

    def attach() -> tuple[tb.extend.Runner, SimulatedShards]:
        algorithm = make(sgd(list(network.parameters())))
        runner = algorithm.reify(rank.group())
        codecs = shard_codecs("a simulation", algorithm)
        return runner, SimulatedShards(
            parts,
            runner,
            codecs,
            rank.compute,
            quantizes_weights=program.quantizes_weights,
            backward_s=lambda parameter: program.backward_s,
        )

    runner, shards = user.attach_with_retries(attach)
    with closing(runner):
        record.attached_s = rank.simulation.scheduler.now_s
        optimizer = make_optimizer(shards.shards)
        data = torch.Generator().manual_seed(rank.number)
        for step in range(program.num_steps):
            if user.leaves(step):
                break
            for _ in range(program.num_backwards):
                user.at("forward", step)
                rank.compute(program.forward_s)
                output = network(torch.randn(3, 8, generator=data))
                user.loss(output.square().sum(), step).backward()
            user.at("step", step)
            if not user.skips_step(step):
                optimizer.step()
            optimizer.zero_grad()
            record.num_steps += 1
        if program.num_steps:
            shards.gather()
    record.result = _flat(network)


def _flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in network.state_dict().values()])


def _num_hooks(owner: torch.nn.Module | torch.optim.Optimizer) -> int:
    """Return the number of hooks of an optimizer, or of a module and its parameters."""
    owners: list[object] = [owner]
    if isinstance(owner, torch.nn.Module):
        owners += [*owner.modules()]
    return sum(
        len(value)
        for own in owners
        for name, value in vars(own).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs")) and isinstance(value, dict)
    )


@contextmanager
def _synchronizing(model: torch.nn.Module, synchronizes: bool) -> Iterator[None]:
    if synchronizes or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
