"""`Transport`, the interface between the package and the network, and its abilities."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

COLLECTIVES = frozenset({"all_to_all", "all_gather", "all_reduce"})
"""The collectives that a transport may have. A transport without messages needs all of them."""

LONGEST_ABORT_S = 10.0
"""The longest time that `Transport.join` waits, in seconds."""


@dataclass(frozen=True)
class Abilities:
    """The abilities of a transport. Collectives, lanes and algorithms check these, and never a backend's name.

    Attributes:
        devices: the device types of the tensors that it sends and receives, such as "cpu".
        in_stream_order: whether it launches its collectives on the current stream without blocking the host; for "cuda"
            only.
        has_messages: whether it sends and receives individual messages, distinguishes them by tag, and supports several
            messages in flight to one peer. Without this ability, every exchange is one collective.
        has_deadline: whether each of its waits ends within the timeout.
        has_collective_close: whether members close it together, so that operations in stream order finish first.
        has_torch_group: whether `torch_group` returns a group.
        collectives: the subset of `COLLECTIVES` that it has.

    Raises:
        ValueError: devices is not a non-empty frozenset, or collectives is not a subset of `COLLECTIVES`.
    """

    devices: frozenset[str]
    in_stream_order: bool = False
    has_messages: bool = True
    has_deadline: bool = True
    has_collective_close: bool = False
    has_torch_group: bool = False
    collectives: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.devices, frozenset) or not self.devices:
            raise ValueError(
                f'Abilities: devices must be a frozenset of device types, such as {{"cpu"}}, got {self.devices!r}'
            )
        if not isinstance(self.collectives, frozenset) or not self.collectives <= COLLECTIVES:
            raise ValueError(
                f"Abilities: collectives must be a frozenset within {sorted(COLLECTIVES)}, got {self.collectives!r}"
            )


@dataclass(frozen=True)
class Members:
    """The ranks of a group, and the store that they share.

    Attributes:
        process_group: the torch group to which the ranks belong.
        ranks: the members, as ranks of `process_group`.
        rank: the index of this rank in `ranks`.
        store: the key-value store that the members share; it contains keys of this group only.
        timeout: the bound on every wait for another member.
        global_ranks: the members' global ranks in the job; the same as `ranks` if the global ranks are unknown.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    store: dist.Store
    timeout: timedelta
    global_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class TransportError(RuntimeError):
    """A transport failed. The communicator adds the operation, the bucket and both ranks.

    Args:
        cause: the failure, in one line.
        peer: the member on the other side of the failed operation; None if the transport does not know it.
    """

    def __init__(self, cause: str, peer: int | None = None) -> None:
        super().__init__(cause)
        self.peer = peer


class LacksAbility(TransportError):
    """The caller used an operation that the transport does not have."""


class MissingOperation(NamedTuple):
    """An operation that the backend of a transport lacks, and the error that the probe raised."""

    backend: str
    operation: str
    cause: str


class Transport(Protocol):
    """Sends tensors between the members of one group.

    A communicator owns the transport, and adds the operation and the ranks to its errors. One thread at a time calls
    it, except for `abort`, which any thread may call. Methods identify members by their index in `Members.ranks`. All
    members call collective methods in the same order. Every method raises `TransportError` on failure, and the
    communicator then calls `abort`; the error of a message names the peer. `torchbagua.transport.suite` tests these
    requirements.

    A class omits the message methods, or the collectives, that its `abilities` do not include.

    Attributes:
        name: the transport's name in errors.
        abilities: the transport's abilities.
    """

    name: str
    abilities: Abilities

    def open(self) -> None:
        """Connect all members now, if the group is small. Collective."""
        return

    def connect(self, peers: Iterable[int] | None) -> None:
        """Connect to `peers`, or to all members if `peers` is None. The peers call it too, in the same exchange.

        The communicator calls it before it sends to these peers or receives from them. It does nothing for peers that
        are already connected.
        """
        return

    def use_device(self, device: torch.device) -> None:
        """Prepare for tensors on `device`, once. Collective."""
        return

    def missing_operation(self) -> MissingOperation | None:
        """Return an operation that the backend lacks on any rank; None if no operation is missing. Collective.

        All ranks return the same value. It is called after `open` for tensors on the CPU, and after `use_device` for
        tensors on other devices.
        """
        return None

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start to send a non-empty tensor. The caller does not modify it until `wait_send` returns."""
        raise LacksAbility(f"{self.name} has no messages")

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start to receive a tensor. `peer` sends one of the same length with this tag."""
        raise LacksAbility(f"{self.name} has no messages")

    def wait_send(self, peer: int, tag: int) -> None:
        """Wait until the message posted with these arguments is sent; do nothing if no message was posted."""
        raise LacksAbility(f"{self.name} has no messages")

    def wait_receive(self, peer: int, tag: int) -> None:
        """Wait until the message posted with these arguments has arrived; do nothing if no message was posted."""
        raise LacksAbility(f"{self.name} has no messages")

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Send `inputs[r]` to each member r and receive `outputs[r]` from it. Tensors may be empty. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Send each member its equal part of `input`, and receive all members' parts in rank order. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Gather all members' `own` into `output`, in rank order. `own` may be its part of `output`. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` with its sum over the members. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def torch_group(self) -> dist.ProcessGroup:
        """Connect all members and return their torch group, for the caller's own operations. Collective."""
        raise LacksAbility(f"{self.name} has no torch group")

    def twin(self) -> "Transport":
        """Return a transport of the same members for one additional thread, with separate tags. Collective."""
        raise LacksAbility(f"{self.name} serves one thread")

    def close(self) -> None:
        """Finish the operations in flight, and close. Collective if `Abilities.has_collective_close`."""
        self.abort()

    @abstractmethod
    def abort(self) -> None:
        """Close at once, even with operations in flight. Members that wait for this one get an error; see `join`."""

    def interrupt(self) -> None:
        """End the waits of other threads with an error, if they do not end by `abort`. `abort` follows."""
        return

    def join(self) -> None:
        """Wait at most `LONGEST_ABORT_S` for `abort` to finish."""
        return


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a uint8 view of the bytes of a contiguous tensor, in the same memory."""
    return tensor.view(-1).view(torch.uint8)


TransportMaker = Callable[[Members], Transport]
"""Opens a transport of these members, of the same class on all of them. A transport class is a `TransportMaker`."""
