"""The collectives of a transport over a torch group that torch's registry need not know."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torchbagua._torch import all_gather_base
from torchbagua.transport.base import Transport, TransportError
from torchbagua.transport.errors import cause_of

COLLECTIVES = frozenset({"all_to_all", "all_gather", "all_reduce"})


class TorchGroupCollectives(Transport):
    """All collectives, by the methods of the group that `torch_group` returns.

    Torch's own functions (`dist.all_reduce` and its like) look the group up in torch's registry when they fail, and
    raise what that says of a group it does not know in place of the error.
    """

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        options = dist.AllToAllOptions()
        options.asyncOp = False
        self._run(lambda group: group.alltoall(outputs, inputs, options))

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        options = dist.AllToAllOptions()
        options.asyncOp = False
        self._run(lambda group: group.alltoall_base(output, input, [], [], options))

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self._run(lambda group: all_gather_base(group, output, own))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        self._run(lambda group: group.allreduce([tensor], options))

    def _run(self, start: Callable[[dist.ProcessGroup], dist.Work | None]) -> None:
        try:
            work = start(self.torch_group())
            if work is not None:  # there is none in stream order
                work.wait()
        except TransportError:
            raise
        except RuntimeError as error:
            raise TransportError(cause_of(error)) from error
