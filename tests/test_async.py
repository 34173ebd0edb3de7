"""Asynchronous averaging: deterministic under a controlled clock, and sound under the machine's own."""

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from averaging import Normed, Trainer, Weights, assert_same_weights, is_buffer, stacked, weights_of
from ranks import run_ranks
from torchbagua.algorithms import AsyncModelAverageAlgorithmImpl
from training import Branches, build

INTERVAL_MS = 1000
F32 = np.float32


class ControlledClock:
    """A clock that stands still until it is told to advance, and knows how often somebody has begun to wait for it."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.num_waits = 0
        self._turn = threading.Condition()

    def now(self) -> float:
        return self.time_s

    def wait(self, turn: threading.Condition, timeout_s: float) -> None:
        self._turn = turn
        self.num_waits += 1
        turn.wait(30)

    def advance(self, seconds: float) -> None:
        with self._turn:
            self.time_s += seconds
            self._turn.notify_all()

    def until_waits(self, num_waits: int) -> None:
        """Return when so many waits have begun: the lane has done all it can do without this clock."""
        deadline_s = time.monotonic() + 30
        while self.num_waits < num_waits:
            assert time.monotonic() < deadline_s, f"{self.num_waits} waits, not {num_waits}"
            time.sleep(0.001)


@dataclass(frozen=True)
class ClockedAlgorithm(tb.AsyncModelAverageAlgorithm):
    """AsyncModelAverage by a clock of the test's."""

    def make_impl(self, process_group: tb.BaguaProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        return AsyncModelAverageAlgorithmImpl(
            process_group, "all", self.sync_interval_ms, self.warmup_steps, clock=ControlledClock(), **self.options
        )


def clocked_run(group: dist.ProcessGroup, model: nn.Module, bucket_cap_mb: float) -> tuple[Trainer, list[str], Weights]:
    """Train at a pace of this rank's own; returns what happened in which order, and the weights at the end."""
    plan = random.Random(group.rank())
    trainer = Trainer(group, model, lr=0.01)
    log: list[str] = []

    def step() -> None:
        trainer.step()
        log.append("step")

    with tb.attach(
        trainer.ddp, trainer.optimizer, ClockedAlgorithm(sync_interval_ms=INTERVAL_MS, bucket_cap_mb=bucket_cap_mb)
    ) as attachment:
        clock = attachment.impl.clock
        clock.until_waits(1)
        for index in range(6):
            for _ in range(plan.randrange(3)):
                step()
            clock.advance(INTERVAL_MS / 1000)
            clock.until_waits(2 * index + 2)  # a snapshot is wanted now
            if plan.random() < 0.3:
                clock.advance(1000)  # longer than any patience: the rank evaluates, its last snapshot serves again
            else:
                log.append("snapshot after")
                step()
            clock.until_waits(2 * index + 3)
            log.append("round")
        assert attachment.impl.num_rounds == 6
        trainer.trace.start.append(weights_of(trainer.module))
    return trainer, log, weights_of(trainer.module)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("bucket_cap_mb", [8.0, 0.001], ids=["one bucket", "several"])
def test_equals_the_oracle_under_a_controlled_clock(size: int, bucket_cap_mb: float) -> None:
    """x += mean - snapshot between two steps, whatever the ranks' paces: every step of every rank, bit for bit."""
    model = build(Normed)
    results = run_ranks(size, lambda group: clocked_run(group, model, bucket_cap_mb))
    traces, logs = [trainer.trace for trainer, _, _ in results], [log for _, log, _ in results]
    assert len({log.count("step") for log in logs}) > 1, "the ranks should take different numbers of steps"
    assert len({log.count("snapshot after") for log in logs}) > 1, "some ranks should miss rounds"
    for name in traces[0].start[0]:
        snapshots = [trace.start[0][name].numpy() for trace in traces]
        pending: list[Any] = [None] * size
        steps = [0] * size
        rest = [iter(log) for log in logs]
        for _ in range(6):
            for rank, trace in enumerate(traces):
                gives_snapshot = False
                for event in itertools.takewhile(lambda event: event != "round", rest[rank]):
                    if event == "snapshot after":
                        gives_snapshot = True
                        continue
                    expected = trace.updated[steps[rank]][name].numpy()
                    if pending[rank] is not None:
                        expected = oracle.moved(expected, *pending[rank], is_buffer=is_buffer(name))
                        pending[rank] = None
                    steps[rank] += 1
                    np.testing.assert_array_equal(trace.start[steps[rank]][name].numpy(), expected)
                    if gives_snapshot:
                        snapshots[rank] = expected
            mean = oracle.ordered_sum(snapshots) / F32(size)
            for rank in range(size):
                difference = mean - snapshots[rank]
                late, since = (F32(0), snapshots[rank]) if pending[rank] is None else pending[rank]
                pending[rank] = (late + difference, since)
                snapshots[rank] = snapshots[rank] + difference
        last = [
            row if late is None else oracle.moved(row, *late, is_buffer=is_buffer(name))
            for row, late in zip([trace.start[-1][name].numpy() for trace in traces], pending, strict=True)
        ]
        for _, _, final in results:
            np.testing.assert_array_equal(final[name].numpy(), oracle.ordered_sum(last) / F32(size))


def run_async(
    size: int,
    body: Callable[[int, Trainer, tb.Attachment], Any],
    algorithm: tb.Algorithm,
    timeout: timedelta = timedelta(seconds=30),
) -> list[Any]:
    """Run `body(rank, trainer, attachment)` on every rank; no lane may stay behind."""
    model = build(Normed)

    def run(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.001)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm, timeout=timeout) as attachment:
            result = body(group.rank(), trainer, attachment)
        trainer.trace.final = weights_of(trainer.module)
        return result, trainer.trace.final

    results = run_ranks(size, run)
    assert not [thread.name for thread in threading.enumerate() if "lane of Async" in thread.name]
    assert_same_weights([final for _, final in results])
    return [result for result, _ in results]


def wait_for_rounds(impl: AsyncModelAverageAlgorithmImpl, num_rounds: int) -> None:
    deadline_s = time.monotonic() + 20
    while impl.num_rounds < num_rounds:
        assert time.monotonic() < deadline_s, f"{impl.num_rounds} rounds, not {num_rounds}"
        time.sleep(0.005)


def test_a_rank_that_evaluates_holds_nobody_up() -> None:
    """While one rank takes no step, the others go on stepping, and rounds go on happening."""
    others_done = threading.Barrier(3)

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        if rank == 0:
            others_done.wait(20)  # "evaluates" until the others have had their steps and rounds
        else:
            for _ in range(20):
                trainer.step()
            wait_for_rounds(attachment.impl, 3)
            for _ in range(20):
                trainer.step()
            others_done.wait(20)

    run_async(3, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=10))


def test_ranks_of_different_speed_and_length_end_with_equal_weights() -> None:
    """A rank that has run out of data waits in detach, contributing what it has learnt, until all are done."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> int:
        for _ in range((5, 40)[rank]):
            trainer.step()
            time.sleep(0.002)
        return attachment.impl.num_rounds

    rounds = run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=5))
    assert rounds[1] > rounds[0]


def test_abort_and_resume() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> list[Weights]:
        impl = attachment.impl
        seen = []
        for _ in range(3):
            for _ in range(3 + rank):
                trainer.step()
            wait_for_rounds(impl, impl.num_rounds + 1)
            impl.abort(trainer.ddp)
            assert impl.state == "stopped"
            impl.abort(trainer.module)
            seen.append(weights_of(trainer.module))
            num_rounds = impl.num_rounds
            trainer.step()
            time.sleep(0.03)
            assert impl.num_rounds == num_rounds  # it trains alone
            seen.append({})
            impl.resume(trainer.ddp)
            impl.resume(trainer.ddp)
            assert impl.state == "running"
        return seen

    seen = run_async(3, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))
    for weights in zip(*seen, strict=True):
        assert_same_weights(weights)


def test_abort_without_a_last_mean_leaves_each_rank_its_own_weights() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> Weights:
        for _ in range(3):
            trainer.step()
        attachment.impl.abort(trainer.ddp, final_average=False)
        return weights_of(trainer.module)

    first, second = run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=10_000))
    assert not torch.equal(first["last.weight"], second["last.weight"])


def test_warm_up_averages_gradients_in_full_precision() -> None:
    """Ranks stay equal and take steps of the oracle's mean gradient; rounds begin with the step after the last."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> list[tuple[Weights, Weights]]:
        seen = []
        local: Weights = {}
        for name, parameter in trainer.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name: local.update({name: parameter.grad.clone()})
                )
        for _ in range(4):
            assert attachment.impl.state == "warm-up"
            assert attachment.impl.num_rounds == 0
            trainer.step()
            averaged = {name: p.grad.clone() for name, p in trainer.module.named_parameters() if p.requires_grad}
            seen.append((dict(local), averaged))
        assert attachment.impl.state == "running"
        trainer.step()
        wait_for_rounds(attachment.impl, 1)
        return seen

    seen = run_async(4, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=4))
    for by_rank in zip(*seen, strict=True):
        for name in by_rank[0][0]:
            expected = oracle.gradient_allreduce(stacked([local for local, _ in by_rank], name))
            for _, averaged in by_rank:
                np.testing.assert_array_equal(averaged[name].numpy().ravel(), expected)


def test_warm_up_with_parameters_that_some_ranks_or_nobody_use() -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        bagua_group = tb.BaguaProcessGroup(group)
        algorithm = tb.AsyncModelAverageAlgorithm(warmup_steps=9)
        with tb.attach(module, optimizer, algorithm, process_group=bagua_group):
            module(torch.ones(2, 10), group.rank()).sum().backward()
            return {name: parameter.grad for name, parameter in module.named_parameters()}

    first, second = run_ranks(2, body)
    assert first["never.weight"] is None
    assert second["never.weight"] is None
    for name in ("left.weight", "right.weight", "stem.weight"):
        assert torch.equal(first[name], second[name])
        assert first[name].any()


def test_warm_up_step_without_backward_through_the_module_raises() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for parameter in trainer.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()

    with pytest.raises(RuntimeError, match="step of the warm-up without averaged gradients"):
        run_async(2, body, tb.AsyncModelAverageAlgorithm(warmup_steps=3))


def test_a_rank_that_leaves_by_an_exception_ends_averaging_for_all() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.001)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=5))
        if group.rank() == 1:
            with pytest.raises(ZeroDivisionError), attachment:
                trainer.step() or 1 / 0
            return

        with attachment:
            while attachment.impl.state == "running":
                trainer.step()
            assert attachment.impl.state == "ended"
            trainer.step()
            attachment.impl.abort(trainer.ddp)
            with pytest.raises(RuntimeError, match="cannot be resumed: rank 1 has left"):
                attachment.impl.resume(trainer.ddp)

    with pytest.warns(RuntimeWarning) as warned:  # around all threads, which share it
        run_ranks(3, body)
    assert len(warned) == 2
    assert all("rank 1 has left the training" in str(one.message) for one in warned)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_interval_of_zero(num_steps: int) -> None:
    """Ends however early it is stopped."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for _ in range(num_steps):
            trainer.step()
        attachment.impl.abort(trainer.ddp)
        attachment.impl.resume(trainer.ddp)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=0))


def test_ranks_that_stop_for_different_reasons() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        trainer.step()
        with pytest.raises(tb.CommunicationError, match="stopped averaging for different reasons: abort and detach"):
            attachment.detach() if rank else attachment.impl.abort(trainer.ddp)
        with pytest.raises(RuntimeError):
            trainer.step() if rank == 0 else attachment.impl.lane.start(lambda: None)

    model = build(Normed)

    def run(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))
        body(group.rank(), trainer, attachment)
        attachment._end(failed=True)

    run_ranks(2, run)


def test_a_layer_that_is_frozen_in_warm_up() -> None:
    """The gradients of the others are averaged all the same: ranks stay equal."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> Weights:
        trainer.step()
        trainer.module.first.requires_grad_(False)
        trainer.module.frozen.requires_grad_(True)
        trainer.step()
        assert all(parameter.grad is not None for parameter in trainer.module.frozen.parameters())
        return {name: p.grad.clone() for name, p in trainer.module.named_parameters() if p.requires_grad}

    assert_same_weights(run_async(2, body, tb.AsyncModelAverageAlgorithm(warmup_steps=9)))


def test_abort_of_a_module_that_was_never_attached() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for method in (attachment.impl.abort, attachment.impl.resume):
            with pytest.raises(ValueError, match=r"module must be the one that .*, got Linear, to which it is not"):
                method(nn.Linear(1, 1))

    run_async(2, body, tb.AsyncModelAverageAlgorithm())

    def unattached(group: dist.ProcessGroup) -> None:
        impl = tb.AsyncModelAverageAlgorithm().reify(group)
        with pytest.raises(ValueError, match="abort: module must be the one that the algorithm is attached to"):
            impl.abort(nn.Linear(1, 1))
        impl.close()

    run_ranks(1, unattached)
