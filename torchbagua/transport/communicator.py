"""A communicator: a group of ranks that exchange tensors, over one transport for each type of devices."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from torchbagua.observe.tracer import Span, Tracer
from torchbagua.transport.base import (
    COLLECTIVES,
    LacksAbility,
    Members,
    MissingOperation,
    Transport,
    TransportError,
)
from torchbagua.transport.errors import CommunicationError, cause_of
from torchbagua.transport.launches import Launches
from torchbagua.transport.named_ranks import NamedRanks
from torchbagua.transport.scratch import Scratch

# A shorter message tells little of a link's rate: it may be gone in one burst.
SMALL_MESSAGE_BYTES = 1 << 18

_HOST = torch.device("cpu")

Direction = Literal["receiving from", "sending to", "connecting to"]


class _Pending(NamedTuple):
    """A message that is under way; its tensor must live until it is waited for, and a transport need not keep that."""

    transport: Transport
    tensor: torch.Tensor
    posted_s: float


@dataclass
class _End:
    """Whether a communicator and its twins are closed, and the error that closed them."""

    is_closed: bool = False
    cause: str = ""


class Communicator(NamedRanks):
    """A group of ranks that exchange tensors, over one transport for each type of devices.

    Every use must come in the same order on all its ranks: one lane, one thread. Ranks are connected by `open`, or
    before their first exchange. Until then a communicator only says who is in it.

    Args:
        members: the ranks.
        scope, tracer: see `NamedRanks`.
        transports: by the types of devices whose tensors they move. The communicator closes them.

    Attributes:
        link_bytes_per_s: for each rank, the best rate of a receive from it longer than SMALL_MESSAGE_BYTES, 0 before
            the first. Data are sent when their receive is posted and not before, so the link is at least as fast.
    """

    def __init__(self, members: Members, scope: str, tracer: Tracer, transports: Mapping[str, Transport]) -> None:
        super().__init__(members, scope, tracer)
        self.link_bytes_per_s = [0.0] * members.size
        self._timeout_s = members.timeout.total_seconds()
        self._transports = dict(transports)
        self._used_devices: set[torch.device] = set()
        self._twins: list[Communicator] = []
        self._end = _End()
        self._launches: Launches | None = None
        self._pending: dict[tuple[int, Direction, int], _Pending] = {}
        self._scratch = Scratch()

    def open(self) -> None:
        """Connect all ranks, if there are not too many. Collective.

        Raises:
            CommunicationError: they could not be connected within the timeout.
        """
        self._check_open("opening the group")
        for transport in self._distinct:
            try:
                transport.open()
            except TransportError as error:
                self._fail_to_connect_all("opening the group", error)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The private torch group of all ranks, for operations of one's own on tensors of the CPU.

        Observers are not notified of these. It connects all ranks, which is collective, if they are not connected yet.
        Raises CommunicationError once it is closed.
        """
        self.connect(None, "an operation")
        try:
            return self._transports["cpu"].torch_group()
        except TransportError as error:
            raise self.failure("an operation", str(error)) from error

    def silent_twin(self) -> "Communicator":
        """Return a communicator over the same connections, for one more thread; it is closed with this one.

        It moves tensors of the CPU. It notifies no observer, since messages of two threads have no common order. It
        needs tags that this one does not use at the same time: other pieces, see `Exchange`. Collective: it connects
        all ranks, if they are not connected yet.

        Raises:
            ValueError: the transport serves one thread.
            CommunicationError: the ranks could not be connected within the timeout.
        """
        purpose = "opening the group for one more thread"
        self._check_open(purpose)
        try:
            transport = self._transports["cpu"].twin()
        except LacksAbility as error:
            raise ValueError(f"torchbagua: {purpose}: {error}; a transport for this must have `twin`") from error
        except TransportError as error:
            self._fail_to_connect_all(purpose, error)
        twin = copy.copy(self)
        twin.tracer, twin._launches = Tracer(()), None
        twin._transports, twin._pending, twin._scratch, twin._twins = {"cpu": transport}, {}, Scratch(), []
        self._twins.append(twin)
        return twin

    def use_transport(self, device_type: str, transport: Transport) -> None:
        """Have `transport` move the tensors of a type of devices from now on."""
        self._transports[device_type] = transport

    def watch_launches(self) -> None:
        """Note what is launched in stream order from now on, for the thread that then calls `poll`."""
        for transport in self._distinct:
            if transport.abilities.in_stream_order:
                self._launches = Launches(transport.name)

    def use_device(self, device: torch.device) -> None:
        """Prepare for tensors on `device`, once. Collective.

        Raises:
            CommunicationError: a rank did not come within the group's timeout, or the backend refuses.
        """
        transport = self._transports.get(device.type)
        if transport is None or device in self._used_devices:
            return
        try:
            transport.use_device(device)
        except TransportError as error:
            raise self.failure(f"connecting {transport.name}", str(error)) from error
        self._used_devices.add(device)

    def poll(self) -> bool:
        """Return whether a GPU is still working on what was launched since `watch_launches`.

        Raises:
            CommunicationError: it has worked on something for longer than the timeout, or the GPU has failed.
        """
        if self._launches is None:
            return False
        name = self._launches.transport_name
        try:
            launch = self._launches.under_way()
        except RuntimeError as error:
            raise self.failure(f"an operation of {name}", cause_of(error)) from error
        if launch is not None and time.monotonic() > launch.at_s + self._timeout_s:
            cause = f"{name} did not finish within {self._timeout_s:g} s: a rank is gone or blocked"
            raise self.failure(launch.purpose, cause)
        return launch is not None

    def scratch(self, role: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for `role`, [num_bytes] uint8, that all users of the group share; see `Scratch`."""
        return self._scratch.part(role, num_bytes, device)

    def in_stream_order(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are moved in the order of the current stream: the host waits for none."""
        return self._transport(device).abilities.in_stream_order

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if no transport moves tensors on `device`."""
        self._transport(device)

    @property
    def has_torch_group(self) -> bool:
        """Whether there is a `torch_group`."""
        return self._transports["cpu"].abilities.has_torch_group

    @property
    def names_without_deadline(self) -> list[str]:
        """The names of transports whose waits may take longer than the timeout."""
        names = [transport.name for transport in self._distinct if not transport.abilities.has_deadline]
        return list(dict.fromkeys(names))  # GPUs' may have that of the host, through which it sends

    def missing_operation(self, device: torch.device) -> MissingOperation | None:
        """Return an operation that moves tensors on `device` and that a rank lacks, the same on all ranks. Collective.

        Raises:
            ValueError: the transport is in stream order, and not for "cuda".
            CommunicationError: a rank is gone, or did not call it within the group's timeout.
        """
        transport = self._transport(device)
        if transport.abilities.in_stream_order and device.type != "cuda":
            raise ValueError(
                f"torchbagua: a transport in stream order must move tensors on cuda alone, got {device.type} from "
                f"{transport.name}"
            )
        if not transport.abilities.has_messages:
            for collective in sorted(COLLECTIVES - transport.abilities.collectives):
                return MissingOperation(transport.name, collective, "its abilities do not name it")
        try:
            return transport.missing_operation()
        except TransportError as error:
            raise self.failure(f"trying the operations of {transport.name}", str(error)) from error

    def posts_messages(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent by `post` and `wait`, one by one; else by one collective."""
        return self._transport(device).abilities.has_messages

    def has_all_reduce(self, device: torch.device) -> bool:
        """Return whether the transport of tensors on `device` has an all-reduce of its own."""
        return "all_reduce" in self._transport(device).abilities.collectives

    def all_reduce(self, tensor: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]) -> None:
        """Replace `tensor` by its sum over the ranks.

        This and the following methods are one collective of the transport.

        Args:
            tensor: on all ranks alike.
            purpose: what for, in errors.
            messages: returns the messages of the operation, of which observers are notified; called if there are some.

        Raises:
            CommunicationError: the transport failed, or is closed. What fails later in stream order is found by who
                polls a private transport, and by the watchdog of the backend.
        """
        self._launch(tensor.device, lambda transport: transport.all_reduce(tensor), purpose, messages)

    def all_to_all(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        purpose: str,
        messages: Callable[[], Sequence[Span]],
    ) -> None:
        """Send `inputs[r]` to each rank r and receive `outputs[r]` from it; see `all_reduce`."""
        self._launch(inputs[0].device, lambda transport: transport.all_to_all(outputs, inputs), purpose, messages)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]
    ) -> None:
        """Send each rank its part of `input`, all of equal length, and receive theirs; see `all_reduce`."""
        self._launch(input.device, lambda transport: transport.all_to_all_single(output, input), purpose, messages)

    def all_gather_into_tensor(
        self, output: torch.Tensor, own: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]
    ) -> None:
        """Receive all ranks' `own` in `output`, of which it may be a part; see `all_reduce`."""
        self._launch(own.device, lambda transport: transport.all_gather_into_tensor(output, own), purpose, messages)

    def _launch(
        self,
        device: torch.device,
        collective: Callable[[Transport], None],
        purpose: str,
        messages: Callable[[], Sequence[Span]],
    ) -> None:
        transport = self._transport(device)
        spans = () if self.tracer.is_idle else messages()
        for span in spans:
            span.begin()
        cause = None
        try:
            collective(transport)
        except TransportError as error:
            cause = str(error)
        if cause is not None:
            self._fail(purpose, cause)
        for span in spans:
            span.end()
        if self._launches is not None and transport.abilities.in_stream_order:
            self._launches.note(purpose, device)

    def connect(self, peers: Iterable[int] | None, purpose: str, device: torch.device = _HOST) -> None:
        """Connect to ranks, before anything is posted to them. They call it too, in the same exchange.

        Args:
            peers: to whom; None for all ranks.
            purpose: what for, in errors.
            device: of the tensors that are posted.

        Raises:
            CommunicationError: a peer is gone, or did not call it within the group's timeout.
        """
        self._check_open(purpose)
        try:
            self._transport(device).connect(peers)
            return
        except TransportError as error:
            if error.peer is None:
                self._fail_to_connect_all(purpose, error)
            cause, peer = str(error), error.peer
        self._fail(purpose, cause, "connecting to", peer)

    def post(self, direction: Direction, peer: int, tensor: torch.Tensor, *, tag: int, purpose: str) -> None:
        """Start to send `tensor` to `peer`, or to receive it from there; nothing where it is empty.

        Args:
            direction: which of the two.
            peer: the other rank.
            tensor: as long on both sides.
            tag: tells messages apart that are under way at the same time.
            purpose: what for, in errors.

        Raises:
            CommunicationError: `peer` is gone, or the group is closed.
        """
        if not tensor.numel():
            return
        self._check_open(purpose)
        key = (tag, direction, peer)
        transport = self._transport(tensor.device)
        self._pending[key] = _Pending(transport, tensor, time.perf_counter())  # before data can flow
        try:
            if direction == "receiving from":
                transport.post_receive(peer, tensor, tag)
            else:
                transport.post_send(peer, tensor, tag)
            return
        except TransportError as error:
            cause = str(error)
        self._fail(purpose, cause, direction, peer)

    def wait(self, direction: Direction, peer: int, *, tag: int, purpose: str) -> None:
        """Wait until what was posted with these arguments is done; nothing where there is none.

        Raises:
            CommunicationError: `peer` is gone, or did not take part within the group's timeout, or the group is closed.
        """
        self._check_open(purpose)
        pending = self._pending.pop((tag, direction, peer), None)
        if pending is None:
            return
        try:
            if direction == "sending to":
                pending.transport.wait_send(peer, tag)
                return
            pending.transport.wait_receive(peer, tag)
        except TransportError as error:
            cause = str(error)
        else:
            if pending.tensor.nbytes > SMALL_MESSAGE_BYTES:
                rate = pending.tensor.nbytes / (time.perf_counter() - pending.posted_s)
                self.link_bytes_per_s[peer] = max(self.link_bytes_per_s[peer], rate)
            return
        self._fail(purpose, cause, direction, peer)

    @property
    def closed_in_order(self) -> list[Transport]:
        """The transports that their members close together, see `Transport.close`."""
        return [transport for transport in self._distinct if transport.abilities.has_collective_close]

    def close(self, failure: CommunicationError | None = None) -> None:
        """Close the connections; peers that still wait for this rank get an error at once.

        If `failure` is why, all that is tried over them afterwards says so, on other threads too.

        A wait that is under way on another thread may keep them open until it ends. What is under way in stream order
        over a private transport is broken off, for which `join` waits.
        """
        if failure is not None and not self._end.is_closed:
            self._end.cause = str(failure)  # first: another thread may look as soon as it is closed
        self._end.is_closed = True
        for transport in self._distinct:
            transport.abort()
        self._pending.clear()  # after what still writes to its tensors
        for twin in self._twins:
            twin.close(failure)

    def join(self) -> None:
        """Wait, for some seconds at most, until what `close` has broken off has come to its end."""
        for transport in self._distinct:
            transport.join()
        for twin in self._twins:
            twin.join()

    @property
    def _distinct(self) -> list[Transport]:
        """The transports, each once: one may move the tensors of several types of devices."""
        return list(dict.fromkeys(self._transports.values()))

    def _transport(self, device: torch.device) -> Transport:
        transport = self._transports.get(device.type)
        if transport is None:
            raise ValueError(
                f"torchbagua: tensors must be on {' or '.join(sorted(self._transports))}, got some on {device}, for "
                f"which the process group has no backend; give init_process_group one for {device.type}"
            )
        return transport

    def _check_open(self, purpose: str) -> None:
        if self._end.is_closed:
            if self._end.cause:
                raise CommunicationError(self._end.cause)
            raise self.failure(purpose, "the group is closed")

    def _fail_to_connect_all(self, purpose: str, error: TransportError) -> NoReturn:
        self._check_open(purpose)  # another thread may have closed it meanwhile
        raise CommunicationError(
            f"torchbagua: the {self.scope} group of ranks {list(self.ranks)} could not be opened on rank "
            f"{self.ranks[self.rank]} within {self._timeout_s:g} s; the ranks have to be started again: {error}"
        ) from error

    def _fail(self, purpose: str, cause: str, direction: Direction | None = None, peer: int | None = None) -> NoReturn:
        # Closing the connections is what tells the other ranks. The frames that the error's traceback keeps must not
        # hold them open, so none has the group or a work in a variable by now.
        if self._end.cause:  # since another thread has closed them
            raise CommunicationError(self._end.cause)
        if "by peer" in cause:
            cause += "; a rank has failed, or has ended after fewer backward passes or steps than this one"
        failure = self.failure(purpose, cause, "" if peer is None else f" {direction} {self.name_of(peer)}")
        self.close(failure)
        raise failure
