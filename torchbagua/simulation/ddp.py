"""Hands gradients to a communication hook as DistributedDataParallel does, whose C++ reducer cannot be simulated."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torchbagua import _concurrency
from torchbagua._torch import queue_callback
from torchbagua.runtime.runner import Runner
from torchbagua.training.comm_hook import comm_hook


@dataclass
class GradientBucket:
    """What a hook reads of a `torch.distributed.GradBucket`."""

    number: int
    owned: list[nn.Parameter]
    ends_backward: bool
    flat: torch.Tensor

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> list[nn.Parameter]:
        return self.owned

    def is_last(self) -> bool:
        return self.ends_backward

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the flat parts of the parameters."""
        parts: tuple[torch.Tensor, ...] = self.flat.split([parameter.numel() for parameter in self.owned])
        return parts


class SimulatedDdp:
    """Calls `comm_hook` for each bucket when its gradients are ready, and waits for all buckets at the end of backward.

    Buckets are formed in the reverse order of the parameters. After the first backward they are rebuilt, in the order
    in which gradients were ready.

    Args:
        module: its parameters all get a gradient in each backward.
        runner: of a gradient algorithm.
        bucket_elements: a bucket is full when it has as many.
        backward_s: returns the seconds that the gradient of a parameter takes.

    Attributes:
        synchronizes: False accumulates gradients, as `no_sync` does.
    """

    def __init__(
        self,
        module: nn.Module,
        runner: Runner,
        bucket_elements: int,
        backward_s: Callable[[nn.Parameter], float] = lambda parameter: 0.0,
    ) -> None:
        self.synchronizes = True
        self._runner = runner
        self._bucket_elements = bucket_elements
        self._backward_s = backward_s
        self._is_rebuilt = False
        self._ready_order: list[nn.Parameter] = []
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        parameters = list(module.parameters())
        self._set_buckets(parameters[::-1])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _set_buckets(self, order: list[nn.Parameter]) -> None:
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in order:
            if sum(other.numel() for other in groups[-1]) >= self._bucket_elements:
                groups.append([])
            groups[-1].append(parameter)
        self._buckets = [
            GradientBucket(number, group, group is groups[-1], torch.zeros(sum(map(torch.numel, group))))
            for number, group in enumerate(groups)
        ]

    def _ready(self, parameter: nn.Parameter) -> None:
        _concurrency.sleep(self._backward_s(parameter))
        if not self.synchronizes:
            return
        if not self._ready_order:
            queue_callback(self._finish)
        self._ready_order.append(parameter)
        # In the order of the buckets, as DDP does, whatever the order in which they are complete.
        while len(self._futures) < len(self._buckets):
            bucket = self._buckets[len(self._futures)]
            if not set(bucket.owned) <= set(self._ready_order):
                break
            torch.cat([owner.grad.view(-1) for owner in bucket.owned if owner.grad is not None], out=bucket.flat)
            self._futures.append(comm_hook(self._runner, bucket))  # type: ignore[arg-type]

    def _finish(self) -> None:
        for future in self._futures:
            _concurrency.wait_for(future)
        for bucket in self._buckets:
            for owner, part in zip(bucket.owned, bucket.parts(), strict=True):
                assert owner.grad is not None
                owner.grad.copy_(part.view_as(owner))
        self._futures.clear()
        if not self._is_rebuilt:
            self._is_rebuilt = True
            self._set_buckets(self._ready_order)
        self._ready_order = []
