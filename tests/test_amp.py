"""GradScaler: an Inf on one rank of a weight algorithm, and warnings of a scaler that attach was not given."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Weights, assert_same_weights, weights_of
from caught import torchbagua_warnings
from ranks import on_each_rank, run_ranks
from training import build

ALGORITHMS = {
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(True, "shift_one"),
    "low precision, every 2": tb.LowPrecisionDecentralizedAlgorithm(communication_interval=2),
    "diloco, every 2": tb.DiLoCoAlgorithm(2),
}
OVERFLOW_STEP, OVERFLOW_RANK, NUM_STEPS = 3, 1, 8
MODEL = build(lambda: nn.Linear(10, 3))


class Loop:
    """A training loop with a GradScaler in which one rank's gradient overflows once."""

    def __init__(self, group: dist.ProcessGroup, *, unscales: bool = False, **options: Any):
        self.rank = group.rank()
        self.module = copy.deepcopy(MODEL)
        self.ddp = DistributedDataParallel(self.module, process_group=group)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.unscales = unscales
        self.data = torch.Generator().manual_seed(self.rank)
        self.updates: list[bool] = []

    def step(self, step: int) -> None:
        before = weights_of(self.module)
        self.optimizer.zero_grad()
        loss = self.ddp(torch.randn(4, 10, generator=self.data)).square().sum()
        if (step, self.rank) == (OVERFLOW_STEP, OVERFLOW_RANK):
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.updates.append(not torch.equal(before["weight"], weights_of(self.module)["weight"]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("all", {"unscales": True}),
        ("shift_one", {"fused": True}),
        ("low precision, every 2", {}),
        ("diloco, every 2", {}),
    ],
)
def test_all_ranks_skip_together(name: str, options: dict[str, Any]) -> None:
    """Schedules stay in step, loss scales stay equal, and weights stay finite."""

    def body(group: dist.ProcessGroup) -> tuple[Weights, float]:
        loop = Loop(group, **options)
        find_inf = loop.scaler._unscale_grads_
        tb.attach(loop.ddp, loop.optimizer, ALGORITHMS[name], grad_scaler=loop.scaler).detach()  # leaves no trace
        with tb.attach(loop.ddp, loop.optimizer, ALGORITHMS[name], grad_scaler=loop.scaler):
            for step in range(NUM_STEPS):
                loop.step(step)
                assert loop.scaler.get_scale() == (8.0 if step < OVERFLOW_STEP else 4.0)
        assert loop.scaler._unscale_grads_ == find_inf
        return weights_of(loop.module), loop.scaler.get_scale()

    weights = [weights for weights, _ in run_ranks(4, body)]
    assert_same_weights(weights)
    assert weights[0]["weight"].isfinite().all()


@pytest.mark.parametrize("name", ["all", "diloco, every 2"])
def test_without_the_scaler_all_ranks_raise(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group)

        def train() -> None:
            with tb.attach(loop.ddp, loop.optimizer, ALGORITHMS[name]):
                for step in range(NUM_STEPS):
                    loop.step(step)

        with pytest.raises(
            tb.CommunicationError,
            match=r"out of step in .* on backward passes in \d steps .*: ranks? .* ha.* \d, .* \d\. .*scaler",
        ):
            train()
        assert len(loop.updates) <= OVERFLOW_STEP + 4  # with an interval of 2, the second round after it raises

    with pytest.warns(RuntimeWarning, match=r"AdamW is stepped by a GradScaler that .* grad_scaler=scaler"):
        run_ranks(4, body)


@pytest.mark.parametrize("name", ["all", "diloco, every 2"])
@on_each_rank(2)
def test_a_rank_that_ends_early_with_a_scaler(group: dist.ProcessGroup, name: str) -> None:
    """Its last mean coincides with the other ranks' search for Inf: all ranks raise, while gloo would abort."""
    loop = Loop(group)

    def train() -> None:
        with tb.attach(loop.ddp, loop.optimizer, ALGORITHMS[name], grad_scaler=loop.scaler):
            for step in range(2 if group.rank() == 1 else NUM_STEPS):
                loop.step(step)

    with pytest.raises(tb.CommunicationError, match=r"out of step in .* on ended attachments: .* 0, rank 1 has 1"):
        train()


def test_two_attachments_share_a_scaler() -> None:
    """For example, of adversarial networks. After one detaches, the other continues."""

    def body(group: dist.ProcessGroup) -> list[bool]:
        first, second = Loop(group), Loop(group)
        second.scaler = first.scaler
        find_inf = first.scaler._unscale_grads_
        attachments = [
            tb.attach(loop.ddp, loop.optimizer, "decentralized", grad_scaler=loop.scaler) for loop in (first, second)
        ]
        attachments[0].detach()
        for step in range(NUM_STEPS):
            second.step(step)
        attachments[1].detach()
        assert first.scaler._unscale_grads_ == find_inf
        return second.updates

    assert run_ranks(2, body) == [[step != OVERFLOW_STEP for step in range(NUM_STEPS)]] * 2


def test_async_skips_per_rank_after_warm_up_and_together_in_warm_up() -> None:
    """At the end, all ranks have equal scales: plain DDP, if training continues with it, sums scaled gradients."""

    def body(group: dist.ProcessGroup, warmup_steps: int) -> tuple[list[bool], float, float]:
        loop = Loop(group)
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=10_000, warmup_steps=warmup_steps)
        with tb.attach(loop.ddp, loop.optimizer, algorithm, grad_scaler=loop.scaler):
            for step in range(NUM_STEPS):
                loop.step(step)
            before = loop.scaler.get_scale()
        return loop.updates, before, loop.scaler.get_scale()

    skipped = [step != OVERFLOW_STEP for step in range(NUM_STEPS)]
    assert run_ranks(2, lambda group: body(group, 0)) == [([True] * NUM_STEPS, 8.0, 8.0), (skipped, 4.0, 8.0)]
    assert run_ranks(2, lambda group: body(group, NUM_STEPS)) == [(skipped, 4.0, 4.0)] * 2


# A GradScaler that attach was not given: one warning, in the first step that the GradScaler calls.


FEEDBACK = tb.ByteGradAlgorithm(error_feedback=True)


class Training:
    """Two modules with an optimizer each."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        self.ddps = [DistributedDataParallel(nn.Linear(3, 3), process_group=group) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1, **options) for ddp in self.ddps]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def backward(self, share: float = 1.0) -> None:
        for ddp, optimizer in zip(self.ddps, self.optimizers, strict=True):
            optimizer.zero_grad()
            self.scaler.scale(share * ddp(torch.ones(1, 3)).sum()).backward()


def steps(scaled: Sequence[int], first_shares: Sequence[float] = ()) -> Callable[[Training], None]:
    """Return a loop in which the scaler steps these optimizers, after backward passes of losses with these factors."""

    def train(training: Training) -> None:
        for share in (*first_shares, 1.0, 1.0, 1.0):
            training.backward(share)
            for index, optimizer in enumerate(training.optimizers):
                if index in scaled:
                    training.scaler.step(optimizer)
                else:
                    optimizer.step()
            training.scaler.update()

    return train


def ask_within_the_step(training: Training) -> None:
    """Ask whether the optimizer unscales, as Lightning does before it clips gradients, also without a GradScaler."""

    def closure() -> float:
        assert not training.optimizers[0]._step_supports_amp_scaling
        training.backward()
        return 0.0

    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.backward()
    for _ in range(3):
        training.optimizers[0].step(closure)
        training.optimizers[1].step()


@pytest.mark.parametrize(
    ("train", "fused", "num_warnings"),
    [
        (steps((0,)), True, 1),
        (steps((1,)), False, 1),
        (steps((0, 1)), True, 1),
        (steps((0, 1)), False, 1),
        (steps((0, 1), (torch.inf, torch.inf)), False, 1),
        (ask_within_the_step, False, 0),
        (Training.backward, False, 0),  # the attachment ends before the first step
    ],
)
def test_a_scaler_that_attach_was_not_given(train: Callable[[Training], None], fused: bool, num_warnings: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        training = Training(group, fused=fused)
        with tb.attach(training.ddps, training.optimizers, FEEDBACK):
            train(training)
        for optimizer in training.optimizers:  # nothing is left there
            assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused

    with torchbagua_warnings() as messages:
        run_ranks(1, body)
    assert len(messages) == num_warnings
    message = "SGD is stepped by a GradScaler that ByteGradAlgorithm was not given"
    assert all(message in each and "pass the GradScaler" in each for each in messages)


def test_two_attachments_of_one_optimizer_that_a_scaler_steps() -> None:
    def body(group: dist.ProcessGroup) -> None:
        training = Training(group)
        optimizer = torch.optim.SGD([parameter for ddp in training.ddps for parameter in ddp.parameters()])
        training.optimizers = [optimizer, optimizer]
        first, second = training.ddps
        with tb.attach(first, optimizer, FEEDBACK), tb.attach(second, optimizer, FEEDBACK):
            training.backward()
            training.scaler.step(optimizer)
        assert optimizer._step_supports_amp_scaling is False

    with torchbagua_warnings() as messages:
        run_ranks(1, body)
    assert len(messages) == 2
