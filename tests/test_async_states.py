"""Any sequence of steps, aborts and resumes, in warm-up too, leaves the lane in the documented state."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import torchbagua as tb
from averaging import assert_same_weights, weights_of
from ranks import gloo_group

SIZE = 2
LIMIT_S = 30
GROUPS: list[dist.ProcessGroup] = []  # kept alive: see run_ranks


class Rank:
    """A rank whose commands run on a separate thread."""

    def __init__(self, store: dist.Store, rank: int, algorithm: tb.Algorithm) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"rank {rank}")
        self.store, self.rank, self.algorithm = store, rank, algorithm

    def attach(self) -> None:
        group = gloo_group(self.store, self.rank, SIZE)
        GROUPS.append(group)
        self.module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.001)
        self.data = torch.Generator().manual_seed(self.rank)
        own = tb.BaguaProcessGroup(group)
        self.attachment = tb.attach(self.module, self.optimizer, self.algorithm, process_group=own)

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.module(torch.randn(3, 4, generator=self.data)).square().sum().backward()
            self.optimizer.step()


class AbortAndResume(RuleBasedStateMachine):
    """Two ranks; `steps` and `is_enabled` contain their state as documented."""

    @initialize(
        interval_ms=st.sampled_from([0, 1]),
        warmup_steps=st.sampled_from([0, 1, 3]),
        compression=st.sampled_from([None, "minmax_uint8"]),
    )
    def attach(self, interval_ms: int, warmup_steps: int, compression: str | None) -> None:
        store = dist.HashStore()
        algorithm = tb.AsyncModelAverageAlgorithm(
            sync_interval_ms=interval_ms, warmup_steps=warmup_steps, compression=compression
        )
        self.ranks = [Rank(store, rank, algorithm) for rank in range(SIZE)]
        self.warmup_steps, self.steps, self.is_enabled = warmup_steps, 0, True
        self.on_all_ranks(Rank.attach)

    def on_all_ranks(self, command: Callable[[Rank], Any]) -> list[Any]:
        futures: list[Future[Any]] = [rank.thread.submit(command, rank) for rank in self.ranks]
        return [future.result(LIMIT_S) for future in futures]

    @property
    def is_warming_up(self) -> bool:
        return self.steps < self.warmup_steps

    @precondition(lambda self: self.is_warming_up)
    @rule()
    def step_together(self) -> None:
        self.on_all_ranks(lambda rank: rank.step(1))
        self.steps += 1

    @precondition(lambda self: not self.is_warming_up)
    @rule(num_steps=st.tuples(st.integers(0, 4), st.integers(0, 4)))
    def step_apart(self, num_steps: tuple[int, int]) -> None:
        self.on_all_ranks(lambda rank: rank.step(num_steps[rank.rank]))
        self.steps += min(num_steps)

    @rule(final_average=st.sampled_from([None, True, False]))
    def abort(self, final_average: bool | None) -> None:
        was_running = self.is_enabled and not self.is_warming_up
        self.on_all_ranks(lambda rank: rank.attachment.impl.abort(rank.module, final_average))
        self.is_enabled = False
        if was_running and final_average is not False:
            assert_same_weights([weights_of(rank.module) for rank in self.ranks])

    @rule()
    def resume(self) -> None:
        self.on_all_ranks(lambda rank: rank.attachment.impl.resume(rank.module))
        self.is_enabled = True

    @rule()
    def reload(self) -> None:
        self.on_all_ranks(lambda rank: rank.attachment.load_state_dict(rank.attachment.state_dict()))

    @precondition(lambda self: self.is_enabled and not self.is_warming_up)
    @rule()
    def rounds_really_happen(self) -> None:
        impl = self.ranks[0].attachment.impl
        num_rounds, deadline_s = impl.num_rounds, time.monotonic() + LIMIT_S
        while impl.num_rounds < num_rounds + 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    @precondition(lambda self: not self.is_enabled or self.is_warming_up)
    @rule()
    def no_rounds_happen(self) -> None:
        num_rounds = [rank.attachment.impl.num_rounds for rank in self.ranks]
        time.sleep(0.01)
        assert [rank.attachment.impl.num_rounds for rank in self.ranks] == num_rounds

    @invariant()
    def state_is_the_documented_one(self) -> None:
        expected = "warm-up" if self.is_warming_up else "running" if self.is_enabled else "stopped"
        assert [rank.attachment.impl.mode for rank in self.ranks] == [expected] * SIZE

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        try:
            self.on_all_ranks(lambda rank: rank.attachment.detach())
            assert_same_weights([weights_of(rank.module) for rank in self.ranks])
            assert not [thread.name for thread in threading.enumerate() if "lane of Async" in thread.name]
        finally:
            for rank in self.ranks:
                rank.thread.shutdown(wait=False)
            GROUPS.clear()


TestAbortAndResume = AbortAndResume.TestCase
TestAbortAndResume.settings = hypothesis.settings(max_examples=5, stateful_step_count=12, deadline=None)


@pytest.mark.soak
class TestMoreExamples(AbortAndResume.TestCase):
    settings = hypothesis.settings(max_examples=30, stateful_step_count=15, deadline=None)
