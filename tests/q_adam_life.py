"""A small run with DDP and a QAdamOptimizer on every rank, and its comparison with the oracle."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from training import device_of, flat, gradients_in

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
NUM_WARM, NUM_STEPS = 3, 7

Tensors = dict[str, torch.Tensor]


@dataclass
class Life:
    """A rank's records, by step and parameter name.

    Attributes:
        local: gradients before averaging.
        gradients: after averaging.
        weights, momenta, second_moments: after the step.
    """

    local: list[Tensors] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    momenta: list[Tensors] = field(default_factory=list)
    second_moments: list[Tensors] = field(default_factory=list)


class ChannelsLast(nn.Module):
    """A convolution whose weight's memory order differs from its shape's, and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 20).t())

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = (x @ x.t()).flatten().repeat(3)[:108].view(3, 3, 3, 4)
        return self.convolution(x).flatten()[:20] @ self.transposed


class Trainer:
    """A rank's copy of a model in DDP with a QAdamOptimizer."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, *, warmup_steps: int = NUM_WARM, **options: Any):
        self.group = group
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        self.named = {name: p for name, p in self.ddp.module.named_parameters() if p.requires_grad}
        self.optimizer = tb.QAdamOptimizer(self.named.values(), warmup_steps=warmup_steps, **SETTINGS)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.device = device_of(model)
        self.life = Life()
        self.num_micro_batches = 1

    def hook(self, nodes: Sequence[int] | None = None, **arguments: Any) -> tb.AlgorithmImpl:
        """Register the standalone hook, in a wrapper that records local gradients."""
        names = {parameter: name for name, parameter in self.named.items()}
        life = self.life  # a hook that refers to its DDP would keep it and its groups alive forever

        def recording_hook(state: tb.AlgorithmImpl, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            life.local[-1].update({names[parameter]: gradient.clone() for parameter, gradient in gradients_in(bucket)})
            return tb.comm_hook(state, bucket)

        group = self.group if nodes is None else tb.BaguaProcessGroup(self.group, nodes=nodes)
        impl = tb.QAdamAlgorithm(self.optimizer, **arguments).reify(group)
        self.ddp.register_comm_hook(impl, recording_hook)
        return impl

    def step(self) -> None:
        index = len(self.life.weights)
        self.life.local.append({})
        self.optimizer.zero_grad()
        for micro_batch in range(self.num_micro_batches):
            with nullcontext() if micro_batch == self.num_micro_batches - 1 else self.ddp.no_sync():
                x = torch.randn(6, 10, generator=self.data).to(self.device)
                self.ddp(x, self.group.rank() + index).square().sum().backward()
        self.life.gradients.append({n: p.grad.clone() for n, p in self.named.items() if p.grad is not None})
        self.optimizer.step()
        states = {name: self.optimizer.state[parameter] for name, parameter in self.named.items()}
        self.life.weights.append({name: p.detach().clone() for name, p in self.named.items()})
        self.life.momenta.append({n: s["exp_avg"].clone() for n, s in states.items() if s})
        self.life.second_moments.append({n: s["exp_avg_sq"].clone() for n, s in states.items() if s})


Average = Callable[[Sequence[oracle.Array]], oracle.Array]


def eight_bits(size: int, nodes: Sequence[int] | None) -> Average:
    """Return the mean of a parameter of `size` elements, without error feedback."""
    return lambda rows: oracle.bytegrad(rows, [size], nodes)


def check_lives(
    lives: Sequence[Life],
    initial: Tensors,
    nodes: Sequence[int] | None = None,
    make_average: Callable[[int, Sequence[int] | None], Average] = eight_bits,
) -> None:
    """Check that gradients and steps equal the oracle's, and warm-up steps torch.optim.Adam's on equal gradients."""
    averages = {name: make_average(value.numel(), nodes) for name, value in initial.items()}
    # On the weights' device: on a GPU Adam is another program, with other last bits.
    adams = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
    adam = torch.optim.Adam(adams.values(), **SETTINGS)
    for step in range(len(lives[0].weights)):
        for name in initial:
            for life in lives[1:]:
                for seen, first in ((life.weights, lives[0].weights), (life.momenta, lives[0].momenta)):
                    assert torch.equal(seen[step][name], first[step][name]), f"replicas differ in {name}, step {step}"
            rows = [flat(life.local[step][name]) for life in lives]
            gradient = flat(lives[0].gradients[step][name])
            if step < NUM_WARM:
                np.testing.assert_array_equal(gradient, oracle.gradient_allreduce(rows, nodes))
                adams[name].grad = lives[0].gradients[step][name]
                continue
            before = flat(lives[0].momenta[step - 1][name])
            np.testing.assert_array_equal(
                gradient, oracle.qadam_gradient(rows, before, SETTINGS["betas"][0], averages[name])
            )
            weight, momentum = oracle.qadam_step(
                flat(lives[0].weights[step - 1][name]),
                gradient,
                before,
                flat(lives[0].second_moments[NUM_WARM - 1][name]),
                num_warm=NUM_WARM,
                num_since=step - NUM_WARM + 1,
                decoupled=False,
                sqrt=_torch_sqrt if before.dtype == np.float64 else np.sqrt,
                **SETTINGS,
            )
            np.testing.assert_array_equal(flat(lives[0].weights[step][name]), weight)
            np.testing.assert_array_equal(flat(lives[0].momenta[step][name]), momentum)
        if step < NUM_WARM:
            adam.step()
            for name in initial:
                assert torch.equal(adams[name], lives[0].weights[step][name])


def _torch_sqrt(x: oracle.Array) -> oracle.Array:
    """Compute float64 square roots as Adam does: with MKL some last bits differ from IEEE's (torch 2.13)."""
    return torch.from_numpy(x).sqrt().numpy()


def initial_of(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
