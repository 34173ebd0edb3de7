"""A small training run with DDP on every rank, which records gradients before and after averaging."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

NUM_STEPS = 4


class Branches(nn.Module):
    """A model with a part that only some ranks and steps use, a part that is never used, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 65)
        self.left, self.right = nn.Linear(65, 33), nn.Linear(65, 33)
        self.never = nn.Linear(5, 5)
        self.head = nn.Linear(33, 1)
        self.frozen = nn.Linear(33, 33)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        hidden = self.stem(x).tanh()
        return self.head(self.frozen((self.left, self.right)[choice % 2](hidden)))


class Tower(nn.Module):
    """Linear layers of odd sizes, the largest with several blocks; optionally in several dtypes."""

    def __init__(
        self, sizes: Sequence[int] = (10, 301, 47, 1), dtypes: Sequence[torch.dtype] = (torch.float32,) * 3
    ) -> None:
        super().__init__()
        widths = zip(itertools.pairwise(sizes), itertools.cycle(dtypes), strict=False)
        self.layers = nn.ModuleList(nn.Linear(before, after, dtype=dtype) for (before, after), dtype in widths)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float()


class Wide(nn.Module):
    """Parameters of float64, complex64, complex128 and float32, and buffers of float64 and complex64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 41, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(41, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(41, 61, dtype=torch.complex64) / 10)
        self.mix = nn.Parameter(torch.randn(3, 61, dtype=torch.complex128).t() / 10)  # not contiguous
        self.last = nn.Linear(3, 1)
        self.register_buffer("running_turn", torch.zeros(41, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, choice: int = 0) -> torch.Tensor:
        hidden = self.norm(self.first(x.double())).tanh()
        with torch.no_grad():
            self.running_turn.mul_(0.9).add_(0.1 * torch.complex(hidden.mean(0), hidden.square().mean(0)))
        turned = (hidden.to(torch.complex64) @ self.turn).to(torch.complex128) @ self.mix
        return self.last((turned.real + turned.imag).float().tanh()).tanh()


class OneElement(nn.Module):
    """A model of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x.sum(1, keepdim=True) * self.weight


@dataclass
class Run:
    """A rank's gradients before and after averaging, by step and parameter name, and its final weights.

    All are on the CPU, where the oracle runs.
    """

    local: list[dict[str, torch.Tensor]] = field(default_factory=list)
    averaged: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def flat(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    """Return all elements as a numpy array, complex elements as pairs."""
    tensor = tensor.detach().flatten().cpu()
    array: npt.NDArray[np.floating] = (torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor).numpy()
    return array


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def gradients_in(bucket: dist.GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of a bucket with their gradients.

    `bucket.gradients()` would treat all parameters as contiguous and real (torch 2.13).
    """
    start = 0
    for parameter in bucket.parameters():
        length = parameter.numel() * (2 if parameter.is_complex() else 1)
        part = bucket.buffer()[start : start + length]
        part = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
        yield parameter, part.as_strided(parameter.shape, parameter.stride())
        start += length


def build(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model from a fixed seed. Do not call it on the ranks' threads: they share torch's global generator."""
    torch.manual_seed(0)
    return make_model()


def train(
    group: dist.ProcessGroup,
    model: nn.Module,
    algorithm: tb.Algorithm | None,
    *,
    nodes: Sequence[int] | None = None,
    own_group: tb.BaguaProcessGroup | None = None,
    num_micro_batches: int = 1,
    num_steps: int = NUM_STEPS,
    tells_optimizer: bool = False,
    before_hook: Callable[[int], None] = lambda step: None,
    **ddp_options: Any,
) -> Run:
    """Train a copy of `model`, on its device, with SGD and the standalone hook; data differ by rank and step.

    Without an algorithm, train with torch's `allreduce_hook`.
    """
    rank, device = group.rank(), device_of(model)
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **ddp_options)
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    run = Run()

    def recording_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        before_hook(len(run.local))
        run.local[-1].update({names[parameter]: gradient.clone() for parameter, gradient in gradients_in(bucket)})
        return (allreduce_hook if algorithm is None else tb.comm_hook)(state, bucket)

    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    runner = None
    if algorithm is not None:
        if nodes is not None:
            own_group = tb.BaguaProcessGroup(group, nodes=nodes)
        runner = algorithm.reify(own_group or group, optimizer=optimizer if tells_optimizer else None)
    ddp.register_comm_hook(group if runner is None else runner, recording_hook)
    data = torch.Generator().manual_seed(1000 + rank)
    for step in range(num_steps):
        optimizer.zero_grad()
        run.local.append({})
        for micro_batch in range(num_micro_batches):
            last = micro_batch == num_micro_batches - 1
            with nullcontext() if last else ddp.no_sync():
                ddp(torch.randn(6, 10, generator=data).to(device), rank + step).square().sum().backward()
        run.averaged.append(
            {name: p.grad.clone() for p, name in names.items() if p.grad is not None and name in run.local[-1]}
        )
        optimizer.step()
    if runner is not None:
        runner.close()
    # Copy only at the end: a copy to the CPU waits for the GPU, and would hide missing waits.
    run.local, run.averaged = list(map(on_cpu, run.local)), list(map(on_cpu, run.averaged))
    run.weights = on_cpu({name: parameter.detach().clone() for parameter, name in names.items()})
    return run
