"""A DistributedDataParallel driven by calls of its module: Bagua's users call `model(x)`, and have no DDP."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua.compat.bagua._torch import DDPOfFunction


class DrivenForward:
    """Creates a DDP, and replaces a module's `forward`, so that each call of the module is a call of the DDP.

    The hooks of the module and of the DDP are called once. The DDP runs the original `forward`.

    Args:
        module: the module.
        process_group: the DDP's process group.
        ddp_arguments: the DDP's other arguments.

    Attributes:
        ddp: the DDP.
    """

    def __init__(
        self, module: torch.nn.Module, process_group: dist.ProcessGroup, ddp_arguments: Mapping[str, Any]
    ) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._was_instance_attribute = "forward" in vars(module)  # instead of its class's method
        self.ddp = DDPOfFunction(module, self._forward, process_group=process_group, **ddp_arguments)

    def install(self) -> None:
        """Route calls of the module to the DDP."""
        self._module.forward = self

    def remove(self) -> None:
        """Route calls to the module again, and remove the DDP. A second call does nothing."""
        if hasattr(self.ddp, "module"):
            del self.ddp.module  # else attach would find this DDP around the module while any reference to it exists
        if vars(self._module).get("forward") is self:
            if self._was_instance_attribute:
                self._module.forward = self._forward
            else:
                del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the DDP.

        Raises:
            RuntimeError: another DDP calls the module.
        """
        calling = [] if torch.compiler.is_compiling() else list(_calling_ddps(self._module))
        if self.ddp in calling:  # the module calls itself
            return self._forward(*args, **kwargs)
        if calling:
            name = type(self._module).__name__
            raise RuntimeError(
                f"torchbagua.compat.bagua: {name} was wrapped in DistributedDataParallel, which averages gradients "
                f"in addition to the algorithm of with_bagua. Call the {name} itself, or wrap it in "
                "torchbagua.compat.bagua.data_parallel.DistributedDataParallel without with_bagua"
            )
        self.ddp.training = self._module.training  # hooks of the DDP read it
        return self.ddp(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Restore the original `forward` in copies of the module, and in files with the whole module."""
        return (_same, (self._forward,)) if self._was_instance_attribute else (getattr, (self._module, "forward"))


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _calling_ddps(module: torch.nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield the DDPs around `module` that are in their forward on this thread."""
    code = DistributedDataParallel.forward.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            ddp = frame.f_locals["self"]
            if any(inner is module for inner in ddp.modules()):
                yield ddp
        frame = frame.f_back
