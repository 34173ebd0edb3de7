"""Many steps of eight ranks with random delays: no rank hangs, and replicas are identical."""

import collections
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from training import Run, Tower, build, train

SIZE = 8


@pytest.mark.parametrize("num_steps", [6, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("algorithm", "nodes"),
    [
        pytest.param(tb.ByteGradAlgorithm(), None, id="flat"),
        pytest.param(tb.ByteGradAlgorithm(), [0, 0, 0, 1, 1, 1, 1, 1], id="hierarchical"),
        pytest.param(tb.PowerSGDAlgorithm(rank=2, start_step=2), None, id="low_rank"),
    ],
)
def test_random_delays(num_steps: int, algorithm: tb.Algorithm, nodes: list[int] | None) -> None:
    model = build(lambda: Tower((10, 60, 70, 60, 70, 60, 1)))

    num_buckets = collections.Counter[int]()

    def body(group: dist.ProcessGroup) -> Run:
        delays = random.Random(group.rank())

        def before_hook(step: int) -> None:
            num_buckets[step] += 1
            if delays.random() < 0.2:
                time.sleep(delays.expovariate(500))

        options = {"bucket_cap_mb": 0.001, "find_unused_parameters": True, "nodes": nodes, "tells_optimizer": True}
        return train(group, model, algorithm, num_steps=num_steps, before_hook=before_hook, **options)

    runs = run_ranks(SIZE, body, timeout=timedelta(minutes=10))
    assert all(len(run.averaged) == num_steps for run in runs)
    assert all(num_buckets[step] >= 4 * SIZE for step in range(2, num_steps))
    for run in runs:
        assert all(torch.equal(weight, runs[0].weights[name]) for name, weight in run.weights.items())
        assert all(torch.equal(run.averaged[-1][name], g) for name, g in runs[0].averaged[-1].items())
        assert all(weight.isfinite().all() for weight in run.weights.values())
