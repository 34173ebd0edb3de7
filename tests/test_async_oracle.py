"""Asynchronous averaging is bitwise equal to the one-process oracle: with a controlled clock, and a mean alone."""

import itertools
import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from averaging import Normed, Trainer, Weights, is_buffer, weights_of
from components import WeightComponent, running
from ranks import run_ranks
from torchbagua.algorithms.weights import asynchronous
from torchbagua.codecs import MinMaxUInt8
from training import Wide, build, flat
from transports import group_like_the_oracle

INTERVAL_MS = 1000
F32 = np.float32


class ControlledClock(threading.Condition):
    """The clock of one rank's rounds, and the condition on which they wait for it. Only `advance` moves it."""

    def __init__(self, here: threading.local) -> None:
        super().__init__()
        self.time_s = 0.0
        self.num_waits = 0
        self._here = here

    def __enter__(self) -> bool:
        self._here.clock = self  # the lane's thread reads the clock of the rounds whose condition it has entered
        return super().__enter__()

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(30)

    def advance(self, seconds: float) -> None:
        with self:
            self.time_s += seconds
            self.notify_all()

    def until_waits(self, num_waits: int) -> None:
        """Return after `num_waits` waits have begun: the lane cannot proceed without this clock."""
        deadline_s = time.monotonic() + 30
        while self.num_waits < num_waits:
            assert time.monotonic() < deadline_s, f"{self.num_waits} waits, not {num_waits}"
            time.sleep(0.001)


class ControlledTime:
    """Replaces `_concurrency` in the algorithm: each rank that attaches has a separate clock."""

    perf_counter_ns = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self._here = threading.local()

    def Condition(self) -> ControlledClock:
        self._here.clock = ControlledClock(self._here)
        return self.clock

    def monotonic(self) -> float:
        return self.clock.time_s

    @property
    def clock(self) -> ControlledClock:
        """The clock of this thread's rank."""
        clock = self._here.clock
        assert isinstance(clock, ControlledClock)
        return clock


def clocked_run(
    group: dist.ProcessGroup, controlled: ControlledTime, model: nn.Module, algorithm: tb.Algorithm
) -> tuple[Trainer, list[str], Weights]:
    """Train at this rank's own pace; return the trainer, the events in order, and the final weights."""
    plan = random.Random(group.rank())
    trainer = Trainer(group, model, lr=0.01)
    log: list[str] = []

    def step() -> None:
        trainer.step()
        log.append("step")

    own = group_like_the_oracle(group)
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=own) as attachment:
        clock = controlled.clock
        clock.until_waits(1)
        for index in range(6):
            for _ in range(plan.randrange(3)):
                step()
            clock.advance(INTERVAL_MS / 1000)
            clock.until_waits(2 * index + 2)  # the lane now waits for a snapshot
            if plan.random() < 0.3:
                clock.advance(1000)  # evaluates for longer than the lane waits: the last snapshot is sent again
            else:
                log.append("snapshot after")
                step()
            clock.until_waits(2 * index + 3)
            log.append("round")
        assert attachment.impl.num_rounds == 6
        trainer.trace.start.append(weights_of(trainer.module))
    return trainer, log, weights_of(trainer.module)


class CompressedDifferences:
    """The ranks' means of snapshots: the last mean plus the compressed mean of differences from it."""

    def __init__(self, segments: list[int], compression: str | None) -> None:
        self.mean: oracle.Array = np.zeros(sum(segments), F32)
        in_4_bits = compression == "minmax_uint4"
        coding = (128, oracle.quantise_block_4_bits) if in_4_bits else (2048, oracle.quantise_block)
        self.two_phase = oracle.TwoPhaseResiduals(lambda row: oracle.quantise(row, segments, *coding))

    def average(self, snapshots: list[oracle.Array]) -> list[oracle.Array]:
        self.two_phase.sent = None  # no error feedback here: the residual stays in the weights
        self.mean = self.mean + self.two_phase([row - self.mean for row in snapshots])
        assert self.two_phase.sent is not None
        return [self.mean + residual for residual in self.two_phase.sent]


@pytest.mark.parametrize(
    ("make_model", "size", "compression", "bucket_cap_mb"),
    [
        (Normed, 4, None, 0.001),  # several buckets
        (Normed, 2, "minmax_uint4", 8.0),
        (Wide, 3, "minmax_uint8", 0.001),
    ],
)
@pytest.mark.filterwarnings("ignore:torchbagua. AsyncModelAverageAlgorithmImpl sends")
def test_equals_the_oracle_under_a_controlled_clock(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    make_model: type[nn.Module],
    size: int,
    compression: str | None,
    bucket_cap_mb: float,
) -> None:
    """x += mean - snapshot between two steps, whatever the ranks' paces; every step of every rank is bitwise equal."""
    model = build(make_model).to(device)
    controlled = ControlledTime()
    monkeypatch.setattr(asynchronous, "_concurrency", controlled)
    algorithm = tb.AsyncModelAverageAlgorithm(
        sync_interval_ms=INTERVAL_MS, bucket_cap_mb=bucket_cap_mb, compression=compression
    )
    results = run_ranks(size, lambda group: clocked_run(group, controlled, model, algorithm), device=device)
    traces, logs = [trainer.trace for trainer, _, _ in results], [log for _, log, _ in results]
    assert len({log.count("step") for log in logs}) > 1, "the ranks should take different numbers of steps"
    assert len({log.count("snapshot after") for log in logs}) > 1, "some ranks should miss rounds"
    for name in traces[0].start[0]:
        snapshots = [flat(trace.start[0][name]) for trace in traces]
        pending: list[Any] = [None] * size
        steps = [0] * size
        rest = [iter(log) for log in logs]
        is_compressed = compression is not None and not is_buffer(name) and snapshots[0].dtype == F32
        differences = CompressedDifferences([snapshots[0].size], compression)
        for index in range(6):
            for rank, trace in enumerate(traces):
                gives_snapshot = False
                for event in itertools.takewhile(lambda event: event != "round", rest[rank]):
                    if event == "snapshot after":
                        gives_snapshot = True
                        continue
                    expected = flat(trace.updated[steps[rank]][name])
                    if pending[rank] is not None:
                        expected = oracle.moved(expected, *pending[rank], is_buffer=is_buffer(name))
                        pending[rank] = None
                    steps[rank] += 1
                    np.testing.assert_array_equal(flat(trace.start[steps[rank]][name]), expected)
                    if gives_snapshot:
                        snapshots[rank] = expected
            if is_compressed and index > 0:
                means = differences.average(snapshots)
            else:
                mean = oracle.ordered_sum(snapshots) / F32(size)
                means, differences.mean = [mean] * size, mean
            for rank in range(size):
                difference = means[rank] - snapshots[rank]
                late, since = (F32(0), snapshots[rank]) if pending[rank] is None else pending[rank]
                pending[rank] = (late + difference, since)
                snapshots[rank] = snapshots[rank] + difference
        last = [
            row if late is None else oracle.moved(row, *late, is_buffer=is_buffer(name))
            for row, late in zip([flat(trace.start[-1][name]) for trace in traces], pending, strict=True)
        ]
        for _, _, final in results:
            np.testing.assert_array_equal(flat(final[name]), oracle.ordered_sum(last) / F32(size))


class MeanOfSnapshots:
    """The weights, and the compressed mean of their bucket."""

    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        self.weights = runner.algorithm.make_weights(runner, dict)

    def append(self, bucket: Any) -> None:
        bucket.append_asynchronous_model_average_op("all", snapshot=bucket.snapshot)
        self.mean = asynchronous.CompressedMean(bucket, MinMaxUInt8())


def snapshot_of(rank: int, number: int) -> torch.Tensor:
    """Return weights that differ between ranks by about 0.01."""
    shared = torch.randn(3000, generator=torch.Generator().manual_seed(number))
    return shared + 0.01 * torch.randn(3000, generator=torch.Generator().manual_seed(1000 + 10 * rank + number))


@pytest.mark.parametrize("size", [2, 3])
def test_an_exact_mean_between_compressed_means_and_weights_loaded_without_residuals(size: int) -> None:
    """The residual of the mean is added to the next mean, except for weights that `average` or `forget` names."""
    algorithm = WeightComponent(make=MeanOfSnapshots, append=MeanOfSnapshots.append, codec=MinMaxUInt8())
    exact, loaded, forgotten = (0, 3), {5: ["first"], 7: ["second"]}, {8: ["first", "second"]}
    places = {"first": slice(0, 2500), "second": slice(2500, 3000)}

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        module = nn.Module()
        module.first, module.second = nn.Parameter(torch.zeros(2500)), nn.Parameter(torch.zeros(500))
        found = []
        with running(group_like_the_oracle(group), algorithm, module=module) as (runner, component):
            (bucket,) = component.weights
            for number in range(9):
                bucket.snapshot.copy_(snapshot_of(group.rank(), number))
                component.mean.forget(forgotten.get(number, ()))
                average = partial(component.mean.average, loaded.get(number, ()), is_exact=number in exact)
                runner.lane.submit(average).result()
                found.append(bucket.flat.clone())
        return found

    ranks = run_ranks(size, body)
    formula = CompressedDifferences([2500, 500], "minmax_uint8")
    for number in range(9):
        snapshots = [snapshot_of(rank, number).numpy() for rank in range(size)]
        if number in exact:
            formula.mean = oracle.gradient_allreduce(snapshots)
            means = [formula.mean] * size
        else:
            for name in (*loaded.get(number, ()), *forgotten.get(number, ())):
                assert formula.two_phase.mean[places[name]].any()
                formula.two_phase.mean[places[name]] = 0
            means = formula.average(snapshots)
            assert not np.array_equal(means[0], means[1])
        for found, expected in zip(ranks, means, strict=True):
            np.testing.assert_array_equal(found[number].numpy(), expected, err_msg=f"round {number}")
