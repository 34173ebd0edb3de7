"""The warm-up of asynchronous averaging: gradients are averaged, and steps without averaged gradients are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from ranks import run_ranks
from training import flat
from transports import group_like_the_oracle


class Parts(nn.Module):
    """Parameters of two dtypes, one of which is not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere = nn.Parameter(torch.zeros(6, 4).t())
        self.somewhere = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.nowhere = nn.Parameter(torch.zeros(3))
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss with these gradients."""
        losses = [(self.get_parameter(name) * gradient.conj()).real.sum() for name, gradient in gradients.items()]
        return torch.stack(losses).sum()


def random(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return torch.empty_like(parameter).copy_(values)  # in the parameter's memory order


def on_ranks(size: int, body: Callable[[int, Parts, torch.optim.Optimizer], Any]) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        module = Parts()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        algorithm = tb.AsyncModelAverageAlgorithm(warmup_steps=9)
        with tb.attach(module, optimizer, algorithm, process_group=group_like_the_oracle(group)):
            return body(group.rank(), module, optimizer)

    return run_ranks(size, run)


def test_gradients_become_their_means() -> None:
    """Also gradients that some ranks lack, but not gradients that all ranks lack. Buffers do not change."""

    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        gradients = {"everywhere": random(module.everywhere, rank)}
        if rank == 1:
            gradients["somewhere"] = random(module.somewhere, 7)
        module(gradients).backward()
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

    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        module({"everywhere": torch.full_like(module.everywhere, 1.0 + 2 * rank)}).backward()
        module({"everywhere": torch.full_like(module.everywhere, 4.0 * rank)}).backward()
        optimizer.step()
        return module.everywhere.grad

    assert all(torch.equal(gradient, torch.full((4, 6), 4.0)) for gradient in on_ranks(2, body))


def test_a_gradient_that_was_cleared_counts_as_zero() -> None:
    """It does not count as the gradient of the last backward, which the buckets still contain."""

    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for has_gradient in (True, rank == 1):
            optimizer.zero_grad()
            name = "everywhere" if has_gradient else "nowhere"
            module({name: torch.full_like(module.get_parameter(name), 2.0)}).backward()
        return module.everywhere.grad

    assert all(torch.equal(gradient, torch.full((4, 6), 1.0)) for gradient in on_ranks(2, body))


def test_each_step_needs_averaged_gradients() -> None:
    def body(rank: int, module: Parts, optimizer: torch.optim.Optimizer) -> None:
        module({"nowhere": torch.ones(3)}).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"without averaged gradients: .*; set warmup_steps=0 if"):
            optimizer.step()

    on_ranks(2, body)
