"""GradScaler with weight algorithms: an Inf on one rank, with and without passing the scaler to attach."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Weights, assert_same_weights, weights_of
from ranks import run_ranks
from training import build

ALGORITHMS = {
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(True, "shift_one"),
    "low precision, every 2": tb.LowPrecisionDecentralizedAlgorithm(communication_interval=2),
    "diloco, every 2": tb.DiLoCoAlgorithm(2),
}
OVERFLOW_STEP, OVERFLOW_RANK, NUM_STEPS = 3, 1, 8


class Loop:
    """A training loop with a GradScaler in which one rank's gradient overflows once."""

    def __init__(self, group: dist.ProcessGroup, model: torch.nn.Module, *, unscales: bool = False, **options: Any):
        self.rank = group.rank()
        self.module = copy.deepcopy(model)
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
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
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
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> tuple[Weights, float]:
        loop = Loop(group, model, **options)
        find_inf = loop.scaler._unscale_grads_
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
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)

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
def test_a_rank_that_ends_early_with_a_scaler(name: str) -> None:
    """Its last mean coincides with the other ranks' search for Inf: all ranks raise, while gloo would abort."""
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)

        def train() -> None:
            with tb.attach(loop.ddp, loop.optimizer, ALGORITHMS[name], grad_scaler=loop.scaler):
                for step in range(2 if group.rank() == 1 else NUM_STEPS):
                    loop.step(step)

        with pytest.raises(tb.CommunicationError, match=r"out of step in .* on ended attachments: .* 0, rank 1 has 1"):
            train()

    run_ranks(2, body)


def test_two_attachments_share_a_scaler() -> None:
    """For example, of adversarial networks. After one detaches, the other continues."""
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> list[bool]:
        first, second = Loop(group, model), Loop(group, model)
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
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> list[list[bool]]:
        updates = []
        for warmup_steps in (0, NUM_STEPS):
            loop = Loop(group, model)
            algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=10_000, warmup_steps=warmup_steps)
            with tb.attach(loop.ddp, loop.optimizer, algorithm, grad_scaler=loop.scaler):
                for step in range(NUM_STEPS):
                    loop.step(step)
            updates.append(loop.updates)
        return updates

    alone, together = zip(*run_ranks(2, body), strict=True)
    skipped = [step != OVERFLOW_STEP for step in range(NUM_STEPS)]
    assert alone == ([True] * NUM_STEPS, skipped)
    assert together == (skipped, skipped)


def test_ranks_that_skipped_independently_end_with_equal_scales() -> None:
    """Otherwise plain DDP, if training continues with it, would sum gradients of different scales."""
    model = build(lambda: torch.nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        loop = Loop(group, model)
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)
        with tb.attach(loop.ddp, loop.optimizer, algorithm, grad_scaler=loop.scaler):
            for step in range(NUM_STEPS):
                loop.step(step)
            before = loop.scaler.get_scale()
        return before, loop.scaler.get_scale()

    (first, *rest), after = zip(*run_ranks(2, body), strict=True)
    assert rest != [first], "one rank should have skipped a step"
    assert after == (first, first)
