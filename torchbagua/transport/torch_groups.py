"""The collectives of a transport over a torch group that torch's registry need not know."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import all_gather_base
from torchbagua.transport.base import Transport, TransportError
from torchbagua.transport.errors import cause_of


class TorchGroupCollectives(Transport):
    """All collectives, by the methods of the group that `torch_group` returns.

    Torch's own functions (`dist.all_reduce` and its like) look the group up in torch's registry when they fail, and
    raise what that says of a group it does not know in place of the error.
    """

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self._run(self.torch_group().alltoall, outputs, inputs, _ordered(dist.AllToAllOptions()))

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._run(self.torch_group().alltoall_base, output, input, [], [], _ordered(dist.AllToAllOptions()))

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self._run(all_gather_base, self.torch_group(), output, own)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._run(self.torch_group().allreduce, [tensor], _ordered(dist.AllreduceOptions()))

    def _run(self, start: Callable[..., dist.Work | None], *arguments: Any) -> None:
        try:
            work = start(*arguments)
            if work is not None:  # there is none in stream order
                work.wait()
        except RuntimeError as error:
            raise TransportError(cause_of(error)) from error


def _ordered(options: Any) -> Any:
    """Return options of a collective for the current stream."""
    options.asyncOp = False
    return options
