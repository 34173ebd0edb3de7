"""A component on a separate runner, which receives the calls of `comm_hook` and `attach` without training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import torchbagua as tb
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm
from torchbagua.codecs.base import Compressor, Identity

T = TypeVar("T")
Append = Callable[[Any, tb.extend.BaguaBucket], object]


def append_nothing(component: object, bucket: tb.extend.BaguaBucket) -> None:
    """Leave the bucket without operations."""


@dataclass(frozen=True, kw_only=True)
class GradientComponent(tb.Algorithm):
    """A gradient algorithm whose impl has one component, from `make`; `append` appends its operations to buckets."""

    make: Callable[[tb.extend.Runner], Any] = field(repr=False)
    append: Append = field(default=append_nothing, repr=False)
    codec: Compressor = field(default_factory=Identity)

    def make_codec(self) -> Compressor:
        return self.codec

    def make_impl(self, runner: tb.extend.GradientRunner) -> "ComponentImpl":
        return ComponentImpl(runner)


@dataclass(frozen=True, kw_only=True)
class WeightComponent(ModelAveragingAlgorithm):
    """A weight algorithm whose impl has one component, with the arguments of `GradientComponent`."""

    make: Callable[[tb.extend.Runner], Any] = field(repr=False)
    append: Append = field(default=append_nothing, repr=False)
    codec: Compressor = field(default_factory=Identity)
    compression: str | None = None

    def make_codec(self) -> Compressor:
        return self.codec

    def make_impl(self, runner: tb.extend.WeightRunner) -> "WeightComponentImpl":
        return WeightComponentImpl(runner)


class ComponentImpl(tb.AlgorithmImpl):
    """The impl of an algorithm with one component."""

    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        self.component = self.algorithm.make(runner)

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        self.algorithm.append(self.component, bucket)


class WeightComponentImpl(ComponentImpl, tb.extend.WeightImpl):
    """The impl of a weight algorithm with one component."""


@contextmanager
def running(
    group: dist.ProcessGroup | tb.BaguaProcessGroup,
    algorithm: tb.Algorithm,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    module: torch.nn.Module | None = None,
    observers: Sequence[tb.observe.Observer] = (),
) -> Iterator[tuple[tb.extend.Runner, Any]]:
    """Yield a runner and its component until the block ends; weight algorithms have the buckets of `module`.

    An impl without components is itself the component.
    """
    runner = algorithm.reify(group, optimizer=optimizer, observers=observers)
    try:
        if module is not None:
            runner.set_module(module)
        yield runner, getattr(runner.impl, "component", runner.impl)
    finally:
        runner.close()


def backward(
    runner: tb.extend.Runner,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    has_joined: bool = False,
) -> tb.extend.BaguaBucket:
    """Do what a synchronized backward of a DDP with one bucket of these gradients does; averages become `.grad`."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for parameter in parameters:
        parameter.grad = None
    runner.begin_backward(has_joined=has_joined)
    bucket = runner.gradient_bucket(parameters, flat, index=0)
    runner.lane.submit(bucket.run).result()
    if not has_joined:
        for parameter, part in zip(
            parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter).clone()
    return bucket


def dyadic(*shape: int, seed: int, num_bits: int = 10, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers between -1 and 1 with `num_bits` bits after the point: sums of a few are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    bound = 2**num_bits
    return (torch.randint(1 - bound, bound, shape, generator=generator) / bound).to(dtype)
