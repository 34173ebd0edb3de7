"""The state of weights with pending differences, which only the same rank loads, with the same weights."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import WeightComponent, running
from ranks import run_ranks
from torchbagua.algorithms.weights.pending_state import load_pending_state, pending_state
from torchbagua.runtime.weight_buckets import DIFFERENCE, SNAPSHOT

NO_PROGRESS: dict[str, int] = {}
ALGORITHM = WeightComponent(make=lambda runner: runner.algorithm.make_weights(runner, lambda: NO_PROGRESS))


def on_ranks(size: int, body: Any, num_features: int = 3) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        with running(group, ALGORITHM, module=nn.BatchNorm1d(num_features)) as (runner, weights):
            return body(group.rank(), runner, weights)

    return run_ranks(size, run)


def save(rank: int, runner: tb.extend.Runner, weights: tb.extend.WeightBuckets) -> dict[str, Any]:
    for number, bucket in enumerate(weights):
        bucket.difference.fill_(10 * rank + number)
        bucket.snapshot.fill_(100 + 10 * rank + number)
    differences = weights.by_name(DIFFERENCE)
    return pending_state(runner, 7, True, differences, weights.by_name(SNAPSHOT, weights.of_buffers))


def test_a_loaded_state_equals_the_saved_state() -> None:
    states = on_ranks(2, save)
    for rank, state in enumerate(states):
        assert {key: state[key] for key in ("rank", "num_ranks", "step", "has_differences")} == {
            "rank": rank,
            "num_ranks": 2,
            "step": 7,
            "has_differences": True,
        }
        assert state["differences"].keys() == {"weight", "bias", "running_mean", "running_var"}
        assert state["buffer_snapshots"].keys() == {"running_mean", "running_var"}

    def load(rank: int, runner: tb.extend.Runner, weights: tb.extend.WeightBuckets) -> None:
        load_pending_state(runner, weights, states[rank], DIFFERENCE, SNAPSHOT)
        for number, bucket in enumerate(weights):
            assert bool((bucket.difference == 10 * rank + number).all())
            expected = 100 + 10 * rank + number if bucket.are_buffers else 0
            assert bool((bucket.snapshot == expected).all())

    on_ranks(2, load)


def test_a_state_of_another_rank_or_of_other_weights_is_refused() -> None:
    states = on_ranks(2, save)

    def load(rank: int, runner: tb.extend.Runner, weights: tb.extend.WeightBuckets) -> None:
        own = states[rank]
        without = {key: value for key, value in own.items() if key != "buffer_snapshots"}
        fewer = {**own, "differences": {"weight": own["differences"]["weight"]}}
        for state, other_keys, message in (
            (states[1 - rank], (), rf"be from rank {rank} of 2, got a state from rank {1 - rank} of 2"),
            ({**own, "num_ranks": 3}, (), rf"be from rank {rank} of 2, got a state from rank {rank} of 3"),
            (without, (), r"must have the keys \[.*'buffer_snapshots'.*\], got \['differences'"),
            (own, ("is_enabled",), r"must have the keys \[.*'is_enabled'.*\], got \['buffer_snapshots'"),
            (fewer, (), r"weights of this module, 4 tensors, got 1; they differ in \['bias'"),
        ):
            with pytest.raises(ValueError, match=rf"^WeightComponent\.load_state_dict: .*{message}"):
                load_pending_state(runner, weights, state, DIFFERENCE, SNAPSHOT, *other_keys)

    on_ranks(2, load)

    def load_other_shapes(rank: int, runner: tb.extend.Runner, weights: tb.extend.WeightBuckets) -> None:
        with pytest.raises(ValueError, match="weights of this module, 4 tensors, got 4; they differ in shapes"):
            load_pending_state(runner, weights, states[rank], DIFFERENCE, SNAPSHOT)

    on_ranks(2, load_other_shapes, num_features=4)
