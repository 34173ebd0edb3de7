"""DistributedDataParallel in a simulation: torch's own, with its reducer, above simulated communication of the hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua import _concurrency

Hook = Callable[[Any, dist.GradBucket], "torch.futures.Future[torch.Tensor]"]


class SimulatedDdp(DistributedDataParallel):
    """A DistributedDataParallel whose own collectives have no effect; only a communication hook sends gradients.

    Torch's reducer forms, rebuilds and orders the buckets. It would wait for the futures of the hook where a simulation
    cannot let other threads run. So the hook of the last bucket waits for them instead.

    Args:
        module: with the same weights on all ranks.
        process_group: the group of a simulated rank.
        backward_s: returns the seconds in which the gradient of a parameter is computed.
        arguments: further arguments of DistributedDataParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup,
        backward_s: Callable[[torch.nn.Parameter], float] = lambda parameter: 0.0,
        **arguments: Any,
    ) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and (seconds := backward_s(parameter)):
                # The reducer's hook is called later, when the gradient is accumulated.
                parameter.register_hook(lambda gradient, seconds=seconds: _concurrency.sleep(seconds))
        super().__init__(module, process_group=process_group, **arguments)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        futures: list[torch.futures.Future[torch.Tensor]] = []

        def wait_at_last(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                futures.clear()
            futures.append(hook(state, bucket))
            if bucket.is_last():
                for future in futures:
                    _concurrency.wait_for(future)
            return futures[-1]

        super().register_comm_hook(state, wait_at_last)
