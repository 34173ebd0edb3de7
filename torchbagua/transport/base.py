"""`Transport`, the seam between the package and the network, and its abilities."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

COLLECTIVES = frozenset({"all_to_all", "all_gather", "all_reduce"})
"""The collectives that a transport may have. One without messages needs all of them."""

LONGEST_ABORT_S = 10.0
"""How long `Transport.join` waits at most."""


@dataclass(frozen=True)
class Abilities:
    """What a transport can do. Collectives, lanes and algorithms ask for these, and never for a backend by name.

    Attributes:
        devices: the types of the devices whose tensors it moves, such as "cpu".
        in_stream_order: whether its collectives are launched on the current stream, and the host waits for none; for
            "cuda" alone.
        has_messages: whether it sends and receives messages one by one, tells them apart by tags, and has several to
            one peer under way at a time. Without, every exchange is one collective.
        has_deadline: whether each of its waits ends within the timeout.
        has_collective_close: whether members close it together, so that what is under way in stream order is finished.
        has_torch_group: whether `torch_group` returns a group.
        collectives: those of `COLLECTIVES` that it has.

    Raises:
        ValueError: devices or collectives are not such sets.
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
                f'Abilities: devices must be a frozenset of types of devices, such as {{"cpu"}}, got {self.devices!r}'
            )
        if not isinstance(self.collectives, frozenset) or not self.collectives <= COLLECTIVES:
            raise ValueError(
                f"Abilities: collectives must be a frozenset of some of {sorted(COLLECTIVES)}, got {self.collectives!r}"
            )


@dataclass(frozen=True)
class Members:
    """The ranks of a group, and where they meet.

    Attributes:
        process_group: the torch group that the ranks are a part of.
        ranks: the members, as ranks of `process_group`.
        rank: the index of this rank in `ranks`.
        store: the key-value store that the members share, with keys of this group alone.
        timeout: the bound on every wait for another member.
        global_ranks: the numbers of the members in the whole job; the same as `ranks` if they are not known.
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
    """A transport failed. The communicator adds operation, bucket and both ranks.

    Args:
        cause: what happened, one line.
        peer: the member with which it failed; None if the transport does not know.
    """

    def __init__(self, cause: str, peer: int | None = None) -> None:
        super().__init__(cause)
        self.peer = peer


class LacksAbility(TransportError):
    """An operation was called that the transport does not have."""


class MissingOperation(NamedTuple):
    """An operation that the backend of a transport lacks, and the error of its trial."""

    backend: str
    operation: str
    cause: str


class Transport(Protocol):
    """Moves tensors between the members of one group.

    A communicator owns it, and adds to its errors who failed at what. One thread at a time calls it, except for
    `abort`, which comes from any thread. Members are indices of `Members.ranks`. All members call collective methods in
    the same order. Every method raises `TransportError`, after which the communicator calls `abort`; that of a message
    names the peer. `torchbagua.transport.suite` tests all this.

    A class leaves out the messages, or the collectives, that its `abilities` say it does not have.

    Attributes:
        name: what errors call it.
        abilities: what it can do.
    """

    name: str
    abilities: Abilities

    def open(self) -> None:
        """Connect all members now, if there are few. Collective."""
        return

    def connect(self, peers: Iterable[int] | None) -> None:
        """Connect to `peers`, or to all members if that is None; they call it too, in the same exchange.

        It comes before anything is sent to them or received from them, and does nothing if they are connected.
        """
        return

    def use_device(self, device: torch.device) -> None:
        """Prepare for tensors on `device`, once. Collective."""
        return

    def missing_operation(self) -> MissingOperation | None:
        """Return an operation that the backend lacks on some rank, the same on all; None if it has all. Collective.

        It comes after `open` for tensors on CPUs, and after `use_device` for others.
        """
        return None

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start to send a tensor that is not empty. It stays as it is until `wait_send` has returned."""
        raise LacksAbility(f"{self.name} has no messages")

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start to receive a tensor as long as the one that `peer` sends with this tag."""
        raise LacksAbility(f"{self.name} has no messages")

    def wait_send(self, peer: int, tag: int) -> None:
        """Wait until the message posted with these arguments is sent; nothing if there is none."""
        raise LacksAbility(f"{self.name} has no messages")

    def wait_receive(self, peer: int, tag: int) -> None:
        """Wait until the message posted with these arguments has arrived; nothing if there is none."""
        raise LacksAbility(f"{self.name} has no messages")

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Send `inputs[r]` to each member r and receive `outputs[r]` from it. Tensors may be empty. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Send each member its part of `input`, all parts of equal length, and receive theirs in order. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Receive all members' `own` in `output`, in order; `own` may be its part of `output`. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the members. Collective."""
        raise LacksAbility(f"{self.name} lacks this collective")

    def torch_group(self) -> dist.ProcessGroup:
        """Return the torch group of the members, for operations of one's own; it connects them. Collective."""
        raise LacksAbility(f"{self.name} has no torch group")

    def twin(self) -> "Transport":
        """Return a transport of the same members for one more thread, with tags of its own. Collective."""
        raise LacksAbility(f"{self.name} serves one thread")

    def close(self) -> None:
        """Finish what is under way, and close. Collective if `Abilities.has_collective_close`."""
        self.abort()

    @abstractmethod
    def abort(self) -> None:
        """Close at once, whatever is under way: members that wait for this one get an error. `join` waits for it."""

    def join(self) -> None:
        """Wait, for `LONGEST_ABORT_S` at most, until `abort` has come to its end."""
        return


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8, in the same memory."""
    return tensor.view(-1).view(torch.uint8)


TransportMaker = Callable[[Members], Transport]
"""Opens a transport of these members; the same class on all of them. A transport class is one."""
