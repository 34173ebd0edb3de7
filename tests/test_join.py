"""Gradient algorithms with torch.distributed.algorithms.Join: ranks with less data continue with zeros."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import run_ranks
from training import Tower, build

SIZE = 3
NUM_MORE_BATCHES = 2  # of each rank than of the rank before
MODEL = build(Tower)
QADAM: Any = "qadam"


@pytest.fixture(autouse=True)
def get_the_rank_from_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join asks torch's registry for its rank, but the registry does not contain the tests' groups."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())


def num_batches(rank: int) -> int:
    return 3 + NUM_MORE_BATCHES * rank


class Trainer:
    """One rank's training, with the standalone hook or attach, and with a Recorder if it is observed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        algorithm: tb.Algorithm | None,
        *,
        nodes: Sequence[int] | None = None,
        is_attached: bool = False,
        is_observed: bool = True,
    ) -> None:
        self.rank = group.rank()
        self.ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=0.01)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        if algorithm is QADAM:
            self.optimizer = tb.QAdamOptimizer(self.ddp.parameters(), lr=0.01, warmup_steps=2)
            algorithm = tb.QAdamAlgorithm(self.optimizer, error_feedback=True)
        self.recorder, self.attachment = tb.observe.Recorder(), nullcontext()
        options: Any = {"observers": [self.recorder] if is_observed else []}
        own = tb.BaguaProcessGroup(group, nodes=nodes)
        if is_attached:
            self.attachment = tb.attach(self.ddp, self.optimizer, algorithm, process_group=own, **options)
        elif algorithm is not None:
            self.ddp.register_comm_hook(algorithm.reify(own, **options), tb.comm_hook)
        self.weights: list[torch.Tensor] = []

    def step(self, batch: int, *, share: float = 1.0) -> None:
        """Train one step, with the gradient multiplied by `share`."""
        self.optimizer.zero_grad()
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * self.rank + batch))
        (share * self.ddp(x, 0).square().sum()).backward()
        self.optimizer.step()
        self.weights.append(flat_weights(self.ddp))


def flat_weights(ddp: DistributedDataParallel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def train_with_join(
    group: dist.ProcessGroup, *arguments: Any, divide_by_initial_world_size: bool = True, **options: Any
) -> Trainer:
    """Train until no rank has data left."""
    trainer = Trainer(group, *arguments, **options)
    join = Join([trainer.ddp], divide_by_initial_world_size=divide_by_initial_world_size)
    with trainer.attachment, join:
        for batch in range(num_batches(trainer.rank)):
            trainer.step(batch)
    return trainer


def train_with_zeros(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Trainer:
    """Train equally many steps on all ranks; ranks without data have zero gradients."""
    trainer = Trainer(group, *arguments, **options)
    with trainer.attachment:
        for batch in range(num_batches(SIZE - 1)):
            trainer.step(batch, share=float(batch < num_batches(trainer.rank)))
    return trainer


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (tb.GradientAllReduceAlgorithm(), {"is_observed": False}),
        (tb.GradientAllReduceAlgorithm(hierarchical=True), {"nodes": [0, 0, 1], "is_attached": True}),
        (tb.ByteGradAlgorithm(), {}),
        (tb.ByteGradAlgorithm(), {"is_attached": True}),
        (tb.ByteGradAlgorithm(), {"nodes": [0, 0, 1], "is_observed": False}),
    ],
    ids=str,
)
def test_joined_ranks_take_part_with_zeros(algorithm: tb.Algorithm, options: dict[str, Any]) -> None:
    """Observers are notified of equally many steps on all ranks."""
    joined = run_ranks(SIZE, lambda group: train_with_join(group, algorithm, **options))
    expected = run_ranks(SIZE, lambda group: train_with_zeros(group, algorithm, **options))
    num_steps = num_batches(SIZE - 1)
    for rank, (actual, reference) in enumerate(zip(joined, expected, strict=True)):
        assert len(actual.weights) == num_batches(rank)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual.weights, reference.weights, strict=False))
        assert torch.equal(flat_weights(actual.ddp), reference.weights[-1])  # DDP gives all ranks the last one's
        if options.get("is_observed", True) and "nodes" not in options:
            # At the end, when they detach, ranks agree that all have ended.
            events = [event for event in actual.recorder.events if event.step < num_steps]
            assert sum(event.phase == "step" for event in events) == num_steps
            # A backward that ends after the lane is done does not wait.
            assert {event.step for event in events if event.phase == "wait"} <= set(range(num_batches(rank)))
            assert {event.step for event in events if event.phase == "send"} == set(range(num_steps))


def test_ranks_that_have_joined_train_another_epoch() -> None:
    """They have taken fewer steps, and hold older weights until its end, which remain no mistakes."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, tb.ByteGradAlgorithm(), is_attached=True)
        with trainer.attachment:
            for num_more in (10, 0):  # ranks compare their weights in the tenth backward
                with Join([trainer.ddp]):
                    for batch in range(num_batches(trainer.rank) + num_more * trainer.rank):
                        trainer.step(batch)

    with torchbagua_warnings() as messages:
        run_ranks(SIZE, body)
    assert messages == []


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_the_mean_equals_the_mean_of_ddp(divides_by_all: bool) -> None:
    """Sums of two ranks are exact. DDP without a hook divides by all ranks only on request; its hooks always do."""

    def last_weights(group: dist.ProcessGroup, algorithm: tb.Algorithm | None) -> torch.Tensor:
        divides = divides_by_all or algorithm is None
        return train_with_join(group, algorithm, divide_by_initial_world_size=divides).weights[-1]

    ours = run_ranks(2, lambda group: last_weights(group, tb.GradientAllReduceAlgorithm()))
    ddps = run_ranks(2, lambda group: last_weights(group, None))
    assert all(torch.equal(actual, reference) for actual, reference in zip(ours, ddps, strict=True))


def test_qadam_continues_from_the_momenta_of_the_others() -> None:
    """Bitwise in the warm-up. Later, a rank without data adopts the mean as its momentum, while others round twice."""
    joined = run_ranks(SIZE, lambda group: train_with_join(group, QADAM, is_attached=True))
    expected = run_ranks(SIZE, lambda group: train_with_zeros(group, QADAM, is_attached=True))
    for actual, reference in zip(joined, expected, strict=True):
        for step, (mine, theirs) in enumerate(zip(actual.weights, reference.weights, strict=False)):
            assert torch.equal(mine, theirs) if step < 3 else torch.allclose(mine, theirs, atol=1e-3), step
        momenta = [
            torch.cat([trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainer.ddp.parameters()])
            for trainer in (actual, joined[-1])
        ]
        assert torch.equal(*momenta)
