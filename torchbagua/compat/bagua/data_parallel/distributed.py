"""Bagua's DistributedDataParallel: torch's class with an algorithm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import parallel

import torchbagua as tb
from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel, buffers_option
from torchbagua.compat.bagua.own_algorithm import is_own
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade, to_bagua_process_group


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's DistributedDataParallel with an algorithm. Collective.

    Args:
        module: the module to train.
        device_ids: see torch's class.
        output_device: see torch's class.
        dim: see torch's class.
        broadcast_buffers: see torch's class. A weight algorithm sends no buffers.
        process_group: the ranks that train together: a group from `new_group`, or torch's group; by default the world.
        bucket_cap_mb: see torch's class.
        find_unused_parameters: see torch's class.
        check_reduction: no effect.
        gradient_as_bucket_view: see torch's class.
        optimizers: the optimizers of the module's parameters. By default the optimizers that the algorithm contains, as
            QAdam does. A gradient algorithm without state between steps needs none.
        algorithm: see `with_bagua`; by default GradientAllReduce.
        grad_scaler: see `with_bagua`.

    Attributes:
        inner: the `BaguaDistributedDataParallel`; None without optimizers.

    Raises:
        ValueError: the algorithm needs optimizers, but there are none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: torch.distributed.ProcessGroup | ProcessGroupFacade | None = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: tb.Algorithm | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        algorithm = tb.GradientAllReduceAlgorithm() if algorithm is None else algorithm
        optimizers = optimizers or algorithm.own_optimizers()
        if not optimizers and (algorithm.averages_weights or is_own(algorithm)):
            raise ValueError(
                f"DistributedDataParallel: optimizers must be given, since {type(algorithm).__name__} works after "
                "their steps"
            )
        own_group = to_bagua_process_group(process_group)
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            **buffers_option(broadcast_buffers),
            process_group=own_group.torch_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self.inner: BaguaDistributedDataParallel | None = None
        self._runner: Any = None
        if not optimizers:
            self._runner = algorithm.reify(self.process_group)
            self.register_comm_hook(self._runner, tb.comm_hook)
            return
        self.inner = BaguaDistributedDataParallel(
            module,
            optimizers,
            algorithm,
            own_group,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            ddp=self,
            grad_scaler=grad_scaler,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Communicate nothing in this context; the first backward after it sends the accumulated gradients."""
        before = self.inner is not None and self.inner.require_backward_grad_sync
        if self.inner is not None:
            self.inner.require_backward_grad_sync = False
        try:
            with super().no_sync():
                yield
        finally:
            if self.inner is not None:
                self.inner.require_backward_grad_sync = before

    @property
    def bagua_algorithm(self) -> Any:
        """The running part of the algorithm."""
        return self._runner if self.inner is None else self.inner.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return [] if self.inner is None else self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Any]:
        """The buckets. Gradient buckets exist after the first backward."""
        return list(self._runner.gradient_buckets) if self.inner is None else self.inner.bagua_buckets
