"""Bagua's `distributed`: the methods that importing `torchbagua.compat.bagua` adds to torch.nn.Module."""

from collections.abc import Sequence
from typing import Any

import torch

from torchbagua import Algorithm
from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade, to_bagua_process_group


class BaguaModule:
    """The methods that importing `torchbagua.compat.bagua` adds to torch.nn.Module.

    Before `with_bagua`, attributes are None instead of raising: torch.compile reads every attribute of its modules.
    """

    def with_bagua(
        self: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: Algorithm | str,
        process_group: torch.distributed.ProcessGroup | ProcessGroupFacade | None = None,
        do_flatten: bool = True,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> torch.nn.Module:
        """Attach an algorithm to the module, and return the module. Collective.

        All ranks get rank 0's weights and the state of its optimizers; each rank keeps its learning rates. A second
        call replaces the current algorithm. `module.bagua_ddp.attachment.detach()` ends the algorithm.

        Args:
            optimizers: the optimizers of the module's parameters.
            algorithm: an algorithm of `torchbagua.compat.bagua.algorithms`, its registered name, or your own algorithm.
            process_group: the ranks that train together; by default all ranks.
            do_flatten: make gradients views of the buckets, instead of copying them into the buckets.
            grad_scaler: the GradScaler of your loop, see `torchbagua.attach`. Bagua's method lacks this argument.

        Raises:
            TypeError, ValueError, TimeoutError, CommunicationError: see `torchbagua.attach`.
            RuntimeError: the default process group does not exist.
        """
        group = to_bagua_process_group(process_group)
        before: BaguaDistributedDataParallel | None = vars(self).pop("bagua_ddp", None)
        if before is not None:
            before.attachment.detach()
            del before  # and its DDP
        self.bagua_ddp = BaguaDistributedDataParallel(
            self,
            optimizers,
            algorithm,
            group,
            bagua_module_name=self.bagua_module_name,
            gradient_as_bucket_view=do_flatten,
            grad_scaler=grad_scaler,
        )
        module: torch.nn.Module = self
        return module

    @property
    def bagua_module_name(self: Any) -> str:
        """The name of the module."""
        return str(vars(self).get("_bagua_module_name", f"{type(self).__name__}_{id(self)}"))

    @bagua_module_name.setter
    def bagua_module_name(self: Any, name: str) -> None:
        self._bagua_module_name = name

    @property
    def bagua_algorithm(self: Any) -> Any:
        """The running part of the algorithm; with AsyncModelAverage it has `abort(module)` and `resume(module)`."""
        return _of_ddp(self, "bagua_algorithm")

    @property
    def bagua_optimizers(self: Any) -> Any:
        """The optimizers passed to `with_bagua`."""
        return _of_ddp(self, "bagua_optimizers")

    @property
    def bagua_buckets(self: Any) -> Any:
        """The buckets. Gradient buckets exist after the first backward."""
        return _of_ddp(self, "bagua_buckets")


def _of_ddp(module: torch.nn.Module, name: str) -> Any:
    ddp = vars(module).get("bagua_ddp")
    return None if ddp is None else getattr(ddp, name)


def install() -> None:
    """Add the methods to torch.nn.Module."""
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            if isinstance(member, property):  # else TorchScript would compile it for every module
                member = torch.jit.unused(member)  # type: ignore[arg-type]
            setattr(torch.nn.Module, name, member)
