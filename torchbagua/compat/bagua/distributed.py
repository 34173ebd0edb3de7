"""Bagua's `distributed`: what importing `torchbagua.compat.bagua` gives to every torch.nn.Module."""

from collections.abc import Sequence
from typing import Any

import torch

from torchbagua import Algorithm
from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade, to_bagua_process_group


class BaguaModule:
    """The methods that importing `torchbagua.compat.bagua` gives to torch.nn.Module.

    Without `with_bagua`, attributes are None and raise nothing: torch.compile reads every attribute of its modules.
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
        """Put an algorithm to work on the module, and return the module. Collective.

        All ranks get rank 0's weights and the state of its optimizers; learning rates stay each rank's own. Called
        again, it ends the algorithm that is at work, and begins another one. `module.bagua_ddp.attachment.detach()`
        ends it for good.

        Args:
            optimizers: of the module's parameters.
            algorithm: one of `torchbagua.compat.bagua.algorithms`, its registered name, or your own.
            process_group: the ranks that train together; by default all.
            do_flatten: have gradients lie in the buckets that are sent, and not be copied there.
            grad_scaler: the GradScaler of your loop, which Bagua's method does not take; see `torchbagua.attach`.

        Raises:
            TypeError, ValueError, TimeoutError, CommunicationError: see `torchbagua.attach`.
            RuntimeError: there is no default process group.
        """
        group = to_bagua_process_group(process_group)
        before: BaguaDistributedDataParallel | None = vars(self).pop("bagua_ddp", None)
        if before is not None:
            before.attachment.detach()
            del before  # and the DDP that it has made
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
        """A name of the module."""
        return str(vars(self).get("_bagua_module_name", f"{type(self).__name__}_{id(self)}"))

    @bagua_module_name.setter
    def bagua_module_name(self: Any, name: str) -> None:
        self._bagua_module_name = name

    @property
    def bagua_algorithm(self: Any) -> Any:
        """What runs the algorithm; of AsyncModelAverage it has `abort(module)` and `resume(module)`."""
        return _of_ddp(self, "bagua_algorithm")

    @property
    def bagua_optimizers(self: Any) -> Any:
        """The optimizers that `with_bagua` was given."""
        return _of_ddp(self, "bagua_optimizers")

    @property
    def bagua_buckets(self: Any) -> Any:
        """The buckets. Those of gradients are there after the first backward."""
        return _of_ddp(self, "bagua_buckets")


def _of_ddp(module: torch.nn.Module, name: str) -> Any:
    ddp = vars(module).get("bagua_ddp")
    return None if ddp is None else getattr(ddp, name)


def install() -> None:
    """Give torch.nn.Module the methods."""
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            if isinstance(member, property):  # which TorchScript would compile, of every module
                member = torch.jit.unused(member)  # type: ignore[arg-type]
            setattr(torch.nn.Module, name, member)
