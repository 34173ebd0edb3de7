"""Warm-ups: they count the optimizer's steps; the warm-up of asynchronous averaging averages gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from ranks import run_ranks
from training import build, flat
from transports import group_like_the_oracle

MODEL = build(lambda: nn.Linear(96, 64))
NUM_WARM = 3
ALGORITHMS = {
    "topk": tb.TopKAlgorithm(warmup_steps=NUM_WARM),
    "powersgd": tb.PowerSGDAlgorithm(rank=2, start_step=NUM_WARM),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=NUM_WARM),
}
PHASED = ["topk", "powersgd"]

# A training step: its number of backward passes, all of them synchronized, and whether GradScaler skips it.
Step = tuple[int, bool]
PLAIN: Step = (1, False)
SKIPPED: Step = (1, True)
ACCUMULATED: Step = (2, False)
STEPS = [PLAIN, SKIPPED, ACCUMULATED, SKIPPED, SKIPPED, ACCUMULATED, PLAIN, PLAIN]


def warm_passes(steps: Sequence[Step], num_warm: int = NUM_WARM) -> list[bool]:
    """Return for each backward whether it belongs to the warm-up, by the number of steps before it."""
    are_warm: list[bool] = []
    num_taken = 0
    for num_passes, is_skipped in steps:
        are_warm += [num_taken < num_warm] * num_passes
        num_taken += not is_skipped
    return are_warm


class Loop:
    """A rank's training loop.

    Attributes:
        operations: for each backward, the names of its buckets' operations, which change after the warm-up.
        modes: for each backward, the mode of `AsyncModelAverageAlgorithm`.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, scales: bool = True) -> None:
        self.rank = group.rank()
        self.ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        weight, bias = self.ddp.parameters()
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([each], lr=0.001) for each in (weight, bias)]
        if name == "qadam":
            self.optimizers = [tb.QAdamOptimizer([weight, bias], lr=0.001, warmup_steps=NUM_WARM)]
        self.algorithm = ALGORITHMS[name] if name in ALGORITHMS else tb.QAdamAlgorithm(self.optimizers[0])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
        self.operations: list[list[str]] = []
        self.modes: list[str] = []

    def attach(self) -> tb.Attachment:
        return tb.attach(self.ddp, self.optimizers, self.algorithm, grad_scaler=self.scaler)

    def backward(self, runner: tb.extend.Runner, factor: float = 1.0) -> None:
        if isinstance(runner.impl, tb.algorithms.AsyncModelAverageAlgorithmImpl):
            self.modes.append(runner.impl.mode)
        self.scaler.scale(self.ddp(torch.full((4, 96), 1.0 + self.rank)).square().mean() * factor).backward()
        buckets = runner.gradient_buckets if isinstance(runner, tb.extend.GradientRunner) else ()
        self.operations.append([operation.name for bucket in buckets for operation in bucket.operations])

    def train(self, runner: tb.extend.Runner, steps: Sequence[Step]) -> None:
        for num_passes, is_skipped in steps:
            self.ddp.zero_grad()
            for _ in range(num_passes):
                self.backward(runner, float("inf") if is_skipped and self.rank == 1 else 1.0)
            scale = self.scaler.get_scale()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            assert (self.scaler.get_scale() < scale) == is_skipped

    @property
    def are_warm(self) -> list[bool]:
        """Return for each backward whether it was in the warm-up; the last backward was not."""
        if self.modes:
            return [mode == "warm-up" for mode in self.modes]
        return [names != self.operations[-1] for names in self.operations]


@pytest.mark.parametrize("name", [*ALGORITHMS, "qadam"])
def test_a_warm_up_counts_the_optimizers_steps(name: str) -> None:
    """It does not count steps that GradScaler skips, and counts several synchronized backward passes as one step."""

    def body(group: dist.ProcessGroup) -> list[bool]:
        loop = Loop(group, name)
        with loop.attach() as attachment:
            loop.train(attachment.runner, STEPS)
        return loop.are_warm

    assert run_ranks(2, body) == [warm_passes(STEPS)] * 2


@pytest.mark.parametrize("name", PHASED)
@pytest.mark.parametrize("stop", [1, 4])  # DDP needs a single synchronized backward in its first step
def test_a_warm_up_continues_from_a_state(name: str, stop: int) -> None:
    def body(group: dist.ProcessGroup) -> list[bool]:
        first = Loop(group, name)
        with first.attach() as attachment:
            first.train(attachment.runner, STEPS[:stop])
            state = attachment.state_dict()
        second = Loop(group, name)
        with second.attach() as attachment:
            attachment.load_state_dict(state)
            second.train(attachment.runner, STEPS[stop:])
        first.operations += second.operations
        return first.are_warm

    assert run_ranks(2, body) == [warm_passes(STEPS)] * 2


@pytest.mark.parametrize("name", PHASED)
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_warm_up_behind_the_standalone_hook(name: str, is_watched: bool) -> None:
    steps = [PLAIN, PLAIN, SKIPPED, PLAIN, PLAIN]

    def body(group: dist.ProcessGroup) -> list[bool]:
        loop = Loop(group, name, scales=False)
        watched = {"optimizer": loop.optimizers} if is_watched else {}
        impl = loop.algorithm.reify(group, **watched)
        loop.ddp.register_comm_hook(impl, tb.comm_hook)
        for _, is_skipped in steps:
            loop.ddp.zero_grad()
            loop.backward(impl)
            if not is_skipped:
                for optimizer in loop.optimizers:
                    optimizer.step()
                if not is_watched:
                    impl.step_taken()
        impl.close()
        return loop.are_warm

    assert run_ranks(2, body) == [warm_passes(steps)] * 2


@pytest.mark.parametrize("name", PHASED)
def test_a_rank_without_data_leaves_the_warm_up_with_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no steps (Join). In the next epoch, or from its state, it continues where the other ranks are."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # for groups that are created by hand

    def body(group: dist.ProcessGroup) -> tuple[list[bool], int]:
        loop = Loop(group, name)
        with loop.attach() as attachment:
            for num_batches in ([2, 1], [4, 4], [2, 1]):
                with Join([loop.ddp]):
                    loop.train(attachment.runner, [PLAIN] * num_batches[group.rank()])
            state = attachment.state_dict()
            attachment.load_state_dict(state)
            loop.train(attachment.runner, [PLAIN])
            return loop.are_warm, attachment.state_dict()["impl"]["num_steps"]

    (first, num_first), (second, num_second) = run_ranks(2, body)
    assert num_first == num_second == 9
    assert first == warm_passes([PLAIN] * 9)
    assert second == [is_warm for number, is_warm in enumerate(first) if number not in (1, 7)]  # in which it has joined


# The warm-up of asynchronous averaging.


class Parts(nn.Module):
    """Parameters of two dtypes, one of which is not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere = nn.Parameter(torch.zeros(6, 4).t())
        self.somewhere = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.nowhere = nn.Parameter(torch.zeros(3))
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss with these gradients."""
        losses = [(self.get_parameter(name) * gradient.conj()).real.sum() for name, gradient in gradients.items()]
        return torch.stack(losses).sum()


def random(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return torch.empty_like(parameter).copy_(values)  # in the parameter's memory order


def on_ranks(size: int, body: Callable[[int, Parts, torch.optim.Optimizer], Any]) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        module = Parts()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        algorithm = tb.AsyncModelAverageAlgorithm(warmup_steps=9)
        with tb.attach(module, optimizer, algorithm, process_group=group_like_the_oracle(group)):
            return body(group.rank(), module, optimizer)

    return run_ranks(size, run)


def test_gradients_become_their_means() -> None:
    """Also gradients that some ranks lack, but not gradients that all ranks lack. Buffers do not change."""

    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        gradients = {"everywhere": random(module.everywhere, rank)}
        if rank == 1:
            gradients["somewhere"] = random(module.somewhere, 7)
        module(gradients).backward()
        assert module.nowhere.grad is None
        assert torch.equal(module.running, torch.arange(3.0))
        assert not module.everywhere.any()
        assert module.somewhere.grad is not None
        assert module.everywhere.grad.stride() == module.everywhere.stride()
        return [module.everywhere.grad, module.somewhere.grad]

    module = Parts()
    everywhere = [flat(random(module.everywhere, rank)) for rank in range(3)]
    present = flat(random(module.somewhere, 7))
    somewhere = [np.zeros_like(present), present, np.zeros_like(present)]
    for found in on_ranks(3, body):
        for gradient, rows in zip(found, (everywhere, somewhere), strict=True):
            np.testing.assert_array_equal(flat(gradient), oracle.gradient_allreduce(rows))


def test_a_gradient_that_was_cleared_counts_as_zero() -> None:
    """It does not count as the gradient of the last backward, which the buckets still contain."""

    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for has_gradient in (True, rank == 1):
            optimizer.zero_grad()
            name = "everywhere" if has_gradient else "nowhere"
            module({name: torch.full_like(module.get_parameter(name), 2.0)}).backward()
        return module.everywhere.grad

    assert all(torch.equal(gradient, torch.full((4, 6), 1.0)) for gradient in on_ranks(2, body))
