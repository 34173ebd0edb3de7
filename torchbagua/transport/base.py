"""`Transport`, the interface between the package and the network, and its abilities."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchbagua._torch import all_gather_base, backend_of, device_types_of, is_gloo, is_nccl
from torchbagua.transport.errors import cause_of

COLLECTIVES = frozenset({"all_to_all", "all_gather", "all_reduce"})
"""The collectives that a transport may have. A transport without messages needs all of them."""

MOST_CONNECTED_AT_ONCE = 32
"""In a larger group, two ranks connect before their first message to each other, or before an operation of all ranks.

In a smaller group, all ranks connect when the group is opened, so that a rank that dies before its first message is
noticed at once.
"""

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
    communicator then calls `abort`; the error of a message names the peer. `torchbagua.testing.transports` tests these
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


Direction = Literal["send", "receive"]

# The errors of torch's calls, also if another thread has destroyed the group in the meantime.
TORCH_ERRORS = (RuntimeError, ValueError, KeyError)


M = TypeVar("M", bound="MessageWorks")


class MessageWorks(Transport):
    """Messages, each a work of torch."""

    def __init__(self) -> None:
        # Works with their tensors, to which a backend may not keep references. `abort` clears this dictionary, since
        # some works keep connections open.
        self._works: dict[object, tuple[dist.Work | None, object]] = {}

    def with_separate_works(self: M) -> M:
        """Return a transport over the same connections, for one more thread."""
        twin = copy.copy(self)
        twin._works = {}
        return twin

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


def backend_names(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the names of the group's backends, by device type.

    If the group is not in torch's registry, because it was constructed manually, its backends are named by class.
    """
    names: dict[str, str] = {}
    with suppress(TypeError, ValueError):  # the registry does not contain the group
        pairs = dist.get_backend_config(process_group).split(",")
        names = {device_type: name for device_type, _, name in (pair.partition(":") for pair in pairs)}
    for device_type in device_types_of(process_group):
        backend = backend_of(process_group, device_type)
        if is_gloo(backend):
            names[device_type] = "gloo"
        elif is_nccl(backend):
            names[device_type] = "nccl"
        else:
            names.setdefault(device_type, type(backend).__name__)
    return names
