"""A small training run with a weight algorithm on every rank, and a trace of its weights."""

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from training import device_of, flat

Weights = dict[str, torch.Tensor]

SYNCHRONOUS = {
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(True, "shift_one"),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(2, delay=1),
}
ALGORITHMS = {**SYNCHRONOUS, "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)}
EVERY = pytest.mark.parametrize("name", ALGORITHMS)
# None of them communicates during the steps of these tests.
RARELY = {
    "decentralized": tb.DecentralizedAlgorithm(communication_interval=100),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(communication_interval=100),
    "diloco": tb.DiLoCoAlgorithm(100),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=20_000),
}


class Normed(nn.Module):
    """Layers of odd sizes with a BatchNorm between them, a frozen layer and a non-persistent cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 301)
        self.norm = nn.BatchNorm1d(301)
        self.frozen = nn.Linear(301, 47)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(47, 1)
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.norm(self.first(x)).tanh()).tanh())


@dataclass
class Trace:
    """The weights and floating-point buffers of one rank, by name; only those that are averaged.

    Attributes:
        start: at the start of each step, and after the last.
        updated: in each step, after the last optimizer's update.
        final: after detach.
    """

    start: list[Weights] = field(default_factory=list)
    updated: list[Weights] = field(default_factory=list)
    final: Weights = field(default_factory=dict)


def weights_of(module: nn.Module) -> Weights:
    """Return a copy of the trained parameters and the persistent floating-point buffers."""
    averaged = {name: p for name, p in module.named_parameters() if p.requires_grad}
    in_state = module.state_dict()
    averaged |= {name: b for name, b in module.named_buffers() if name in in_state and b.dtype != torch.int64}
    return {name: tensor.detach().clone() for name, tensor in averaged.items()}


def make_sgd(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return SGD with momentum, for the trained parameters."""
    return [torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr, momentum=0.9)]


class Trainer:
    """A copy of a model on one rank, on its device, wrapped in DDP, with separate optimizers and data.

    The optimizers step in the order in which `make_optimizers` returns them. `optimizer` is the first one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model: nn.Module,
        *,
        lr: float = 0.1,
        make_optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]] = make_sgd,
        **ddp_options: Any,
    ) -> None:
        self.module = copy.deepcopy(model)
        self.ddp = DistributedDataParallel(self.module, process_group=group, **ddp_options)
        self.optimizers = make_optimizers(self.module, lr)
        self.optimizer = self.optimizers[0]
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.device = device_of(self.module)
        self.trace = Trace()
        self.optimizers[-1].register_step_post_hook(lambda *_: self.trace.updated.append(weights_of(self.module)))

    def step(self) -> None:
        """Take one step of a user's loop."""
        self.trace.start.append(weights_of(self.module))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.ddp(torch.randn(6, 10, generator=self.data).to(self.device)).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()


def train(
    group: dist.ProcessGroup,
    model: nn.Module,
    algorithm: tb.Algorithm,
    *,
    nodes: Sequence[int] | None = None,
    num_steps: int = 7,
    after_step: Callable[[Trainer, tb.Attachment], None] = lambda trainer, attachment: None,
    **trainer_options: Any,
) -> Trace:
    """Train a copy of `model` with `algorithm`."""
    trainer = Trainer(group, model, **trainer_options)
    bagua_group = None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
    with tb.attach(trainer.ddp, trainer.optimizers, algorithm, process_group=bagua_group) as attachment:
        for _ in range(num_steps):
            trainer.step()
            after_step(trainer, attachment)
        trainer.trace.start.append(weights_of(trainer.module))
    trainer.trace.final = weights_of(trainer.module)
    return trainer.trace


def check_resume(
    group: dist.ProcessGroup,
    model: nn.Module,
    algorithm: tb.Algorithm,
    resumed: tb.Algorithm,
    stop: int,
    *,
    nodes: Sequence[int] | None = None,
    **trainer_options: Any,
) -> None:
    """Check that a run of 11 steps, saved after `stop` steps and resumed with `resumed`, is bitwise equal."""
    end = 11
    expected = train(group, model, algorithm, num_steps=end, nodes=nodes, **trainer_options)

    def attach(trainer: Trainer, algorithm: tb.Algorithm) -> tb.Attachment:
        bagua_group = tb.BaguaProcessGroup(group, nodes=nodes)
        return tb.attach(trainer.ddp, trainer.optimizers, algorithm, process_group=bagua_group)

    first = Trainer(group, model, **trainer_options)
    with attach(first, algorithm) as attachment:
        for _ in range(stop):
            first.step()
        file = io.BytesIO()
        torch.save([attachment.rank_state_dict(), first.data.get_state()], file)
        first.step()  # saving must change nothing
        assert_same_weights([weights_of(first.module), expected.start[stop + 1]])
    file.seek(0)
    second = Trainer(group, model, **trainer_options)
    with attach(second, resumed) as attachment:
        for _ in range(4):
            second.step()  # loading must undo these steps
        state, data = torch.load(file, weights_only=True)
        attachment.load_rank_state_dict(state)
        second.data.set_state(data)
        for step in range(stop, end):
            assert_same_weights([weights_of(second.module), expected.start[step]])
            second.step()
    assert_same_weights([weights_of(second.module), expected.final])


def is_buffer(name: str) -> bool:
    """Return whether `name` is a buffer of `Normed` or `Wide`."""
    return "running" in name


def stacked(weights: Sequence[Weights], name: str) -> list[oracle.Array]:
    """Return one tensor of all ranks, as flat numpy arrays."""
    return [flat(rank_weights[name]) for rank_weights in weights]


def assert_same_weights(weights: Sequence[Weights]) -> None:
    """Check that the weights of all ranks are bitwise equal."""
    for rank_weights in weights[1:]:
        for name, tensor in weights[0].items():
            assert torch.equal(tensor, rank_weights[name]), name


def check_unchanged(trace: Trace) -> None:
    """Check that averaging has not changed the weights after the optimizer's steps."""
    assert trace.updated
    for step, updated in enumerate(trace.updated):
        assert_same_weights([updated, trace.start[step + 1]])
    assert_same_weights([trace.start[-1], trace.final])


def batches(rank: int) -> Callable[[], torch.Tensor]:
    """Return a function that returns the next batch of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return lambda: torch.randn(6, 10, generator=generator)


def alone(group: dist.ProcessGroup, body: Callable[[], Any]) -> Any:
    """Run `body` on one rank after another: any communication with a blocked rank would wait for it."""
    for rank in range(group.size()):
        if rank == group.rank():
            result = body()
        dist.barrier(group=group)
    return result
