"""GradientWarmUp: weight buckets average gradients, and steps without averaged gradients are refused."""

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
from torchbagua.algorithms.weights.gradient_warm_up import GradientWarmUp
from torchbagua.runtime.weight_buckets import WeightBucket
from training import flat
from transports import group_like_the_oracle

NO_PROGRESS: dict[str, int] = {}


class Parts(nn.Module):
    """Parameters of two dtypes, one of which is not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere = nn.Parameter(torch.zeros(6, 4).t())
        self.somewhere = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.nowhere = nn.Parameter(torch.zeros(3))
        self.register_buffer("running", torch.arange(3.0))


class Component:
    """The warm-up, and the weights whose gradients it averages."""

    def __init__(self, runner: tb.extend.Runner) -> None:
        self.weights = runner.algorithm.make_weights(runner, lambda: NO_PROGRESS)
        self.warm_up = GradientWarmUp(self.weights, runner.process_group)


def append(component: Component, bucket: tb.extend.BaguaBucket) -> None:
    assert isinstance(bucket, WeightBucket)
    bucket.append_asynchronous_model_average_op("all", snapshot=bucket.snapshot)


ALGORITHM = WeightComponent(make=Component, append=append)


def random(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return torch.empty_like(parameter).copy_(values)  # in the parameter's memory order


def on_ranks(size: int, body: Any) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        module = Parts()
        with running(group_like_the_oracle(group), ALGORITHM, module=module) as (_, component):
            return body(group.rank(), module, component.warm_up)

    return run_ranks(size, run)


def test_gradients_become_their_means() -> None:
    """Also gradients that some ranks lack, but not gradients that all ranks lack. Buffers do not change."""

    def body(rank: int, module: Parts, warm_up: GradientWarmUp) -> list[torch.Tensor]:
        module.everywhere.grad = random(module.everywhere, rank)
        if rank == 1:
            module.somewhere.grad = random(module.somewhere, 7)
        warm_up.average_gradients()
        assert module.nowhere.grad is None
        assert torch.equal(module.running, torch.arange(3.0))
        assert not module.everywhere.any()
        assert module.somewhere.grad is not None
        assert module.everywhere.grad.stride() == module.everywhere.stride()
        return [module.everywhere.grad, module.somewhere.grad]

    module = Parts()
    everywhere = [flat(random(module.everywhere, rank)) for rank in range(3)]
    present = flat(random(module.somewhere, 7))
    somewhere = [np.zeros_like(present), present, np.zeros_like(present)]
    for found in on_ranks(3, body):
        for gradient, rows in zip(found, (everywhere, somewhere), strict=True):
            np.testing.assert_array_equal(flat(gradient), oracle.gradient_allreduce(rows))


def test_gradients_of_another_backward_are_averaged_again() -> None:
    """The gradient that was averaged before is equal on all ranks, so its mean does not change."""

    def body(rank: int, module: Parts, warm_up: GradientWarmUp) -> torch.Tensor:
        module.everywhere.grad = torch.full_like(module.everywhere, 1.0 + 2 * rank)
        warm_up.average_gradients()
        module.everywhere.grad += 4.0 * rank
        warm_up.average_gradients()
        warm_up.after_step()
        return module.everywhere.grad

    assert all(torch.equal(gradient, torch.full((4, 6), 4.0)) for gradient in on_ranks(2, body))


def test_a_gradient_that_was_cleared_counts_as_zero() -> None:
    """It does not count as the gradient of the last backward, which the buckets still contain."""

    def body(rank: int, module: Parts, warm_up: GradientWarmUp) -> torch.Tensor:
        for has_gradient in (True, rank == 1):
            module.everywhere.grad = torch.full_like(module.everywhere, 2.0) if has_gradient else None
            warm_up.average_gradients()
        return module.everywhere.grad

    assert all(torch.equal(gradient, torch.full((4, 6), 1.0)) for gradient in on_ranks(2, body))


def test_each_step_needs_averaged_gradients() -> None:
    def body(rank: int, module: Parts, warm_up: GradientWarmUp) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"without averaged gradients: .*; set warmup_steps=0 if"):
                warm_up.after_step()
            warm_up.average_gradients()
            warm_up.after_step()

    on_ranks(2, body)
