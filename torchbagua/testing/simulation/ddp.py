"""DistributedDataParallel in a simulation: torch's own, with its reducer, above simulated communication of the hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua import _concurrency

Compute = Callable[[float], None]
"""Lets virtual time pass, as a computation of so many seconds does: `Rank.compute`."""

Hook = Callable[[Any, dist.GradBucket], "torch.futures.Future[torch.Tensor]"]


class SimulatedDdp(DistributedDataParallel):
    """A DistributedDataParallel whose own collectives have no effect; only a communication hook sends gradients.

    Torch's reducer forms, rebuilds and orders the buckets. It would wait for the futures of the hook where a simulation
    cannot let other threads run. So the hook of the last bucket waits for them instead.

    Args:
        module: with the same weights on all ranks.
        process_group: the group of a simulated rank.
        compute: computes on this rank.
        backward_s: returns the seconds in which the gradient of a parameter is computed.
        arguments: further arguments of DistributedDataParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup,
        compute: Compute,
        backward_s: Callable[[torch.nn.Parameter], float] = lambda parameter: 0.0,
        **arguments: Any,
    ) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and (seconds := backward_s(parameter)):
                # The reducer's hook is called later, when the gradient is accumulated.
                parameter.register_hook(lambda gradient, seconds=seconds: compute(seconds))
        super().__init__(module, process_group=process_group, **arguments)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        futures: list[torch.futures.Future[torch.Tensor]] = []  # of this backward

        def wait_at_last(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                futures.clear()
            future = hook(state, bucket)
            futures.append(future)
            if bucket.is_last():
                for earlier in futures:
                    _concurrency.wait_for(earlier)
                futures.clear()  # the garbage collector does not see the reducer's reference to this hook
            return future

        super().register_comm_hook(state, wait_at_last)
