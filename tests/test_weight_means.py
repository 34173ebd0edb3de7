"""WeightMeans.average_tensors: the mean over ranks of tensors outside the module."""

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
from training import flat

NO_PROGRESS: dict[str, int] = {}
ALGORITHM = WeightComponent(make=lambda runner: runner.algorithm.make_weights(runner, lambda: NO_PROGRESS))


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(4, 6, generator=generator).t(),  # not contiguous
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(5, generator=generator, dtype=torch.complex64),
        torch.randn((), generator=generator),
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_of_tensors_outside_the_module(size: int) -> None:
    """Tensors of different shapes raise on all ranks, and stay unchanged."""

    def body(group: dist.ProcessGroup) -> Any:
        with running(group, ALGORITHM, module=nn.Linear(2, 2)) as (_, weights):
            tensors = tensors_of(group.rank())
            weights.means.average_tensors(tensors, "running means")
            if size > 1:
                different = [torch.full((2, 3), 1.0 + group.rank()), torch.zeros(2 + group.rank())]
                with pytest.raises(tb.CommunicationError, match=r"in the mean of running means: .* the fingerprint of"):
                    weights.means.average_tensors(different, "running means")
                assert bool((different[0] == 1.0 + group.rank()).all())
        return tensors

    ranks = run_ranks(size, body)
    for index, rows in enumerate(zip(*map(tensors_of, range(size)), strict=True)):
        expected = oracle.gradient_allreduce([flat(row) for row in rows])
        for found in ranks:
            np.testing.assert_array_equal(flat(found[index]), expected)
