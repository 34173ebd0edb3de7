"""What transports over a torch group share: messages that are works of torch, and collectives."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchbagua._torch import all_gather_base
from torchbagua.transport.base import Transport, TransportError
from torchbagua.transport.errors import cause_of

Direction = Literal["send", "receive"]

# What torch's calls raise, also of a group that another thread has destroyed meanwhile.
TORCH_ERRORS = (RuntimeError, ValueError, KeyError)


class MessageWorks(Transport):
    """Messages, each a work of torch."""

    def __init__(self) -> None:
        # Works, with the tensors that a backend may not keep: here, where `abort` ends them, since some hold
        # connections open.
        self._works: dict[object, tuple[dist.Work | None, object]] = {}

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether `abort` was called."""

    @abstractmethod
    def _start(self, direction: Direction, peer: int, tensor: torch.Tensor, tag: int) -> dist.Work | None:
        """Start to send or to receive."""

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._post("send", peer, tensor, tag)

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._post("receive", peer, tensor, tag)

    def wait_send(self, peer: int, tag: int) -> None:
        self._wait("send", peer, tag)

    def wait_receive(self, peer: int, tag: int) -> None:
        self._wait("receive", peer, tag)

    def _post(self, direction: Direction, peer: int, tensor: torch.Tensor, tag: int) -> None:
        key = (direction, peer, tag)
        assert key not in self._works
        try:
            self._works[key] = self._start(direction, peer, tensor, tag), tensor
        except TransportError as error:
            raise TransportError(str(error), peer) from error
        except TORCH_ERRORS as error:
            raise TransportError(cause_of(error), peer) from error

    def _wait(self, direction: Direction, peer: int, tag: int) -> None:
        work, _ = self._works.pop((direction, peer, tag), (None, None))
        if work is not None:
            try:
                work.wait()
            except TORCH_ERRORS as error:
                raise TransportError(cause_of(error), peer) from error
        elif self.is_closed:  # by another thread, which has dropped the works
            raise TransportError("the group is closed", peer)


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
