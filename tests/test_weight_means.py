"""WeightMeans: the mean of all ranks' weights, temporarily or at the end, and the mean of other tensors."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from averaging import Weights, assert_same_weights, stacked, weights_of
from components import WeightComponent, running
from ranks import run_ranks
from torchbagua.runtime.weight_buckets import WeightMeans
from training import flat

NO_PROGRESS: dict[str, int] = {}
ALGORITHM = WeightComponent(
    make=lambda runner: runner.algorithm.make_weights(runner, lambda: NO_PROGRESS),
    append=lambda weights, bucket: bucket.append_centralized_synchronous_op(),
    bucket_cap_mb=0.0001,  # several buckets
)


def module_of(rank: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 1).double())
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


def on_ranks(size: int, body: Any) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        module = module_of(group.rank())
        with running(group, ALGORITHM, module=module) as (_, weights):
            return body(group.rank(), module, weights)

    return run_ranks(size, run)


def check_mean(found: list[Weights], size: int) -> None:
    before = [weights_of(module_of(rank)) for rank in range(size)]
    assert_same_weights(found)
    for name, weight in found[0].items():
        np.testing.assert_array_equal(flat(weight), oracle.gradient_allreduce(stacked(before, name)), err_msg=name)


def test_averaged_and_own_restore_the_weights() -> None:
    """Both restore the module and the flat tensors, even after an exception."""

    def body(rank: int, module: nn.Module, weights: tb.extend.WeightBuckets) -> Weights:
        means: WeightMeans = weights.means
        for number, bucket in enumerate(weights):
            bucket.flat.fill_(number)
        before = weights_of(module)
        with suppress(ZeroDivisionError), means.averaged():
            found = weights_of(module)
            with suppress(ZeroDivisionError), means.own():
                assert_same_weights([weights_of(module), before])
                raise ZeroDivisionError
            assert_same_weights([weights_of(module), found])
            with means.own():
                pass
            assert_same_weights([weights_of(module), found])
            raise ZeroDivisionError
        assert_same_weights([weights_of(module), before])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        later = weights_of(module)
        with means.own():  # the module already has this rank's weights
            assert_same_weights([weights_of(module), later])
        assert all(bool((bucket.flat == number).all()) for number, bucket in enumerate(weights))
        return found

    check_mean(on_ranks(3, body), 3)


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(4, 6, generator=generator).t(),  # not contiguous
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(5, generator=generator, dtype=torch.complex64),
        torch.randn((), generator=generator),
    ]


def test_the_mean_of_tensors_outside_the_module() -> None:
    def body(rank: int, module: nn.Module, weights: tb.extend.WeightBuckets) -> list[torch.Tensor]:
        before, tensors = weights_of(module), tensors_of(rank)
        weights.means.average_tensors(tensors, "running means")
        assert_same_weights([weights_of(module), before])
        return tensors

    ranks = on_ranks(3, body)
    for index, rows in enumerate(zip(*map(tensors_of, range(3)), strict=True)):
        expected = oracle.gradient_allreduce([flat(row) for row in rows])
        for found in ranks:
            np.testing.assert_array_equal(flat(found[index]), expected)


def test_tensors_of_different_shapes_raise_on_all_ranks() -> None:
    def body(rank: int, module: nn.Module, weights: tb.extend.WeightBuckets) -> None:
        tensors = [torch.full((2, 3), 1.0 + rank), torch.zeros(2 + rank)]
        with pytest.raises(tb.CommunicationError, match=r"in the mean of running means: .* the fingerprint of"):
            weights.means.average_tensors(tensors, "running means")
        assert bool((tensors[0] == 1.0 + rank).all())

    on_ranks(2, body)


def test_all_ranks_raise_if_one_ends_while_others_continue() -> None:
    def body(rank: int, module: nn.Module, weights: tb.extend.WeightBuckets) -> None:
        before = weights_of(module)

        def meet() -> None:
            if rank == 0:
                weights.means.take()
            else:
                with weights.means.averaged():
                    raise AssertionError("it has not the mean")

        with pytest.raises(tb.CommunicationError, match="ended attachments: rank 0 has 1, rank 1 has 0"):
            meet()
        assert_same_weights([weights_of(module), before])

    on_ranks(2, body)


def test_a_single_rank_already_has_the_mean() -> None:
    def body(rank: int, module: nn.Module, weights: tb.extend.WeightBuckets) -> None:
        before, tensors = weights_of(module), tensors_of(rank)
        with weights.means.averaged(), weights.means.own():
            assert_same_weights([weights_of(module), before])
        weights.means.average_tensors(tensors, "running means")
        assert all(map(torch.equal, tensors, tensors_of(rank)))

    on_ranks(1, body)
