"""A DistributedDataParallel that calls of its module drive: Bagua's users call `model(x)`, and have no DDP."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua.compat.bagua._torch import DDPOfFunction


class DrivenForward:
    """Takes the place of a module's `forward`, so that each call of the module is one of a DDP. It makes that DDP.

    The module's own hooks, and those of the DDP, are called once. The DDP runs what `forward` was before.

    Args:
        module: the module.
        process_group: of the DDP.
        ddp_arguments: the DDP's other arguments.

    Attributes:
        ddp: the DDP.
    """

    def __init__(
        self, module: torch.nn.Module, process_group: dist.ProcessGroup, ddp_arguments: Mapping[str, Any]
    ) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._was_own = "forward" in vars(module)  # and not that of its class
        self.ddp = DDPOfFunction(module, self._forward, process_group=process_group, **ddp_arguments)

    def install(self) -> None:
        """Have calls of the module be calls of the DDP."""
        self._module.forward = self

    def remove(self) -> None:
        """Have them be calls of the module again. A second call does nothing."""
        if vars(self._module).get("forward") is self:
            if self._was_own:
                self._module.forward = self._forward
            else:
                del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the DDP.

        Raises:
            RuntimeError: another DDP calls the module.
        """
        calling = [] if torch.compiler.is_compiling() else list(_calling_ddps())
        if self.ddp in calling:  # the module calls itself
            return self._forward(*args, **kwargs)
        if calling:
            name = type(self._module).__name__
            raise RuntimeError(
                f"torchbagua.compat.bagua: {name} was wrapped in DistributedDataParallel, which averages gradients "
                f"beside the algorithm of with_bagua. Call the {name} itself, or wrap it in "
                "torchbagua.compat.bagua.data_parallel.DistributedDataParallel and leave out with_bagua"
            )
        self.ddp.training = self._module.training  # of which hooks on the DDP ask
        return self.ddp(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the module's own `forward` in copies, and in files that hold all of the module."""
        return getattr, (self._module, "forward")


def _calling_ddps() -> Iterator[DistributedDataParallel]:
    """Yield the DDPs within whose forward this is called, on this thread."""
    code = DistributedDataParallel.forward.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back
