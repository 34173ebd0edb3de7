"""CompressedMean: means of snapshots, exact or by compressed differences, are bitwise equal to the oracle's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from components import WeightComponent, running
from ranks import run_ranks
from test_async_oracle import CompressedDifferences
from torchbagua.algorithms.weights.asynchronous import CompressedMean
from torchbagua.codecs import MinMaxUInt8
from torchbagua.runtime.weight_buckets import WeightBucket
from transports import group_like_the_oracle

LENGTH = 3000  # of two blocks
NO_PROGRESS: dict[str, int] = {}
CODEC = "minmax_uint8"


class Component:
    """The weights, and the mean of their bucket."""

    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        self.weights = runner.algorithm.make_weights(runner, lambda: NO_PROGRESS)

    def append(self, bucket: tb.extend.BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.append_asynchronous_model_average_op("all", snapshot=bucket.snapshot)
        self.mean = CompressedMean(bucket, MinMaxUInt8())


class Rounds:
    """Rounds of one rank over one bucket."""

    def __init__(self, rank: int, runner: tb.extend.WeightRunner, component: Component) -> None:
        self.rank = rank
        self.runner = runner
        self.mean = component.mean
        self.bucket: WeightBucket
        (self.bucket,) = component.weights

    def round(self, number: int, *, is_exact: bool = False, loaded: Sequence[str] = ()) -> torch.Tensor:
        self.bucket.snapshot.copy_(snapshot(self.rank, number))
        self.runner.lane.submit(lambda: self.mean.average(loaded, is_exact=is_exact)).result()
        return self.bucket.flat.clone()


def snapshot(rank: int, number: int) -> torch.Tensor:
    """Return weights that differ between ranks by about 0.01."""
    shared = torch.randn(LENGTH, generator=torch.Generator().manual_seed(number))
    return shared + 0.01 * torch.randn(LENGTH, generator=torch.Generator().manual_seed(1000 + 10 * rank + number))


def on_ranks(size: int, body: Any) -> list[Any]:
    algorithm = WeightComponent(make=Component, append=Component.append, codec=MinMaxUInt8())

    def run(group: dist.ProcessGroup) -> Any:
        module = nn.Module()
        module.first, module.second = nn.Parameter(torch.zeros(2500)), nn.Parameter(torch.zeros(500))
        with running(group_like_the_oracle(group), algorithm, module=module) as (
            runner,
            component,
        ):
            return body(Rounds(group.rank(), runner, component))

    return run_ranks(size, run)


def exact_mean(size: int, number: int) -> oracle.Array:
    return oracle.gradient_allreduce([snapshot(rank, number).numpy() for rank in range(size)])


class Formula(CompressedDifferences):
    """The oracle for two parameters; blocks end at a parameter's end."""

    def __init__(self) -> None:
        super().__init__(LENGTH, CODEC)
        self.two_phase = oracle.TwoPhaseResiduals(lambda row: oracle.quantise(row, [2500, 500]))

    def of_round(self, size: int, number: int) -> list[oracle.Array]:
        return self.average([snapshot(rank, number).numpy() for rank in range(size)])


def assert_equals(found: Sequence[torch.Tensor], expected: Sequence[oracle.Array]) -> None:
    for rank, (tensor, row) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(tensor.numpy(), row, err_msg=f"rank {rank}")


@pytest.mark.parametrize("size", [2, 3])
def test_differences_from_the_last_exact_mean_are_compressed(size: int) -> None:
    """The residual of a rank's difference stays with the rank; the residual of the mean is added to the next mean."""

    def body(rounds: Rounds) -> list[torch.Tensor]:
        return [rounds.round(number, is_exact=number in (0, 3)) for number in range(5)]

    ranks = on_ranks(size, body)
    formula = Formula()
    for number in range(5):
        if number in (0, 3):
            formula.mean = exact_mean(size, number)
            expected = [formula.mean] * size
        else:
            expected = formula.of_round(size, number)
            assert not np.array_equal(expected[0], expected[1])
        assert_equals([found[number] for found in ranks], expected)


@pytest.mark.parametrize("names", [["first"], ["second"], ["first", "second"]])
def test_loaded_weights_have_no_residual(names: list[str]) -> None:
    """Neither those that `average` names, nor those that `forget` names."""

    def body(rounds: Rounds) -> list[torch.Tensor]:
        found = [rounds.round(number, is_exact=number == 0) for number in range(2)]
        if len(names) == 2:
            rounds.mean.forget(names)
            return [*found, rounds.round(2)]
        return [*found, rounds.round(2, loaded=names)]

    ranks = on_ranks(2, body)
    formula = Formula()
    formula.mean = exact_mean(2, 0)
    formula.of_round(2, 1)
    kept = formula.two_phase.mean
    assert kept.any()
    formula.two_phase.mean = kept.copy()
    for name in names:
        formula.two_phase.mean[slice(0, 2500) if name == "first" else slice(2500, LENGTH)] = 0
    assert_equals([found[2] for found in ranks], formula.of_round(2, 2))
