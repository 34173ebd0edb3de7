"""Base classes of transports over a torch group: messages as torch works, and collectives."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchbagua._torch import all_gather_base
from torchbagua.transport.base import Transport, TransportError
from torchbagua.transport.errors import cause_of

Direction = Literal["send", "receive"]

# The errors of torch's calls, also if another thread has destroyed the group in the meantime.
TORCH_ERRORS = (RuntimeError, ValueError, KeyError)


class MessageWorks(Transport):
    """Messages, each a work of torch."""

    def __init__(self) -> None:
        # Works with their tensors, to which a backend may not keep references. `abort` clears this dictionary, since
        # some works keep connections open.
        self._works: dict[object, tuple[dist.Work | None, object]] = {}

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether `abort` was called."""

    @abstractmethod
    def _start(self, direction: Direction, peer: int, tensor: torch.Tensor, tag: int) -> dist.Work | None:
        """Start to send or receive."""

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

    If one of torch's own functions, such as `dist.all_reduce`, fails, it looks the group up in torch's registry. For an
    unregistered group the lookup raises another error, which hides the actual one.
    """

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self._run(self.torch_group().alltoall, outputs, inputs, _in_stream_order(dist.AllToAllOptions()))

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._run(self.torch_group().alltoall_base, output, input, [], [], _in_stream_order(dist.AllToAllOptions()))

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self._run(all_gather_base, self.torch_group(), output, own)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._run(self.torch_group().allreduce, [tensor], _in_stream_order(dist.AllreduceOptions()))

    def _run(self, start: Callable[..., dist.Work | None], *arguments: Any) -> None:
        try:
            work = start(*arguments)
            if work is not None:  # None in stream order
                work.wait()
        except RuntimeError as error:
            raise TransportError(cause_of(error)) from error


def _in_stream_order(options: Any) -> Any:
    """Set the options of a collective to run on the current stream."""
    options.asyncOp = False
    return options
