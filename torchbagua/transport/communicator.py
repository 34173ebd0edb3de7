"""A communicator: a group of ranks that exchange tensors, over one transport for each device type.

`TransportChoice` opens the transports. It imports a transport if a group needs it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._torch import backend_of, is_nccl, nccl_options
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span, Tracer
from torchbagua.transport.base import (
    COLLECTIVES,
    Abilities,
    LacksAbility,
    Members,
    MissingOperation,
    Transport,
    TransportError,
    TransportMaker,
    backend_names,
)
from torchbagua.transport.errors import BUSY_ADVICE, CommunicationError, cause_of
from torchbagua.transport.gloo import GlooTransport
from torchbagua.transport.store_requests import StoreRequests
from torchbagua.transport.streams import Launches

# A shorter message says little about a link's rate, since it may be sent in one burst.
SMALL_MESSAGE_BYTES = 1 << 18

# Messages of different operations may be in flight at the same time.
_TAGS = {"all_to_all": 0, "all_gather": 1, "peer_exchange": 2, "agreement": 3}

_HOST = torch.device("cpu")

Direction = Literal["receiving from", "sending to", "connecting to"]

Messages = Callable[[], Sequence[Span]]
"""Returns the spans of the messages of a collective; called only if there are observers."""


def tag_of(operation: str, channel: int) -> int:
    """Return the tag of a message. Messages of one operation may be in flight together on different channels."""
    return _TAGS[operation] + channel * len(_TAGS)


class Communicator:
    """A group of ranks that exchange tensors, over one transport for each device type.

    All ranks must use it in the same order: one lane, one thread. `open` connects the ranks, or else the first exchange
    does. Before that, a communicator only lists its ranks.

    Attributes:
        scope, tracer: as passed.
        ranks: the members, as ranks of the user's group.
        rank: the index of this rank in `ranks`.
        size: the number of ranks.
        link_bytes_per_s: for each rank, the best rate of a receive from it longer than SMALL_MESSAGE_BYTES; 0 before
            the first such receive. No data are sent before their receive is posted, so the link is at least as fast.
    """

    _launches: Launches | None = None

    def __init__(self, members: Members, scope: str, tracer: Tracer, transports: Mapping[str, Transport]) -> None:
        self.scope = scope
        self.tracer = tracer
        self.ranks = members.ranks
        self.rank = members.rank
        self.size = members.size
        self.link_bytes_per_s = [0.0] * members.size
        self._global_ranks = members.global_ranks
        self._timeout_s = members.timeout.total_seconds()
        self._transports = dict(transports)
        self._used_devices: set[torch.device] = set()
        self._twins: list[Communicator] = []
        self._ends: list[str] = []  # shared with twins; an entry for each `close`: the error that closed them, or ""
        # Messages in flight: their transport, their tensor, which must live until the wait, and the time of the post.
        self._pending: dict[tuple[int, Direction, int], tuple[Transport, torch.Tensor, float]] = {}
        self._num_messages: Counter[tuple[str, int]] = Counter()
        # By role and stream, then by the number of bytes.
        self._scratch: dict[tuple[str, torch.cuda.Stream | None], dict[int, torch.Tensor]] = {}

    def rank_before(self, distance: int) -> int:
        """Return the rank `distance` places before this one, around the ring."""
        return (self.rank - distance) % self.size

    def rank_after(self, distance: int) -> int:
        """Return the rank `distance` places after this one, around the ring."""
        return (self.rank + distance) % self.size

    def span(self, phase: Phase, details: Details, *, on_host: bool = False) -> Span:
        """Return the span of an operation over this group; see `Tracer.span`. `details` need not name the group."""
        if self.tracer.is_idle:
            return NO_SPAN
        return self.tracer.span(phase, details._replace(scope=self.scope, ranks=self.ranks), on_host=on_host)

    def message_span(self, phase: Literal["send", "receive"], peer: int, details: Details, *, on_host: bool) -> Span:
        """Return the span of one message to or from `peer`. Both sides must create equally many message spans."""
        self._num_messages[phase, peer] = message = self._num_messages[phase, peer] + 1
        details = details._replace(peers=(self.ranks[peer],), message=message)
        return self.span(phase, details, on_host=on_host)

    def failure(self, purpose: str, cause: str, whom: str = "") -> CommunicationError:
        """Return the error for a `purpose` that failed on this rank. `whom` is, say, " receiving from rank 3"."""
        own = self.name_of(self.rank)
        return CommunicationError(f"torchbagua: {purpose} over the {self.scope} group failed on {own}{whom}: {cause}")

    def name_of(self, rank: int) -> str:
        """Return "rank 1" for errors, or "rank 1 (global rank 3)" if its global rank differs."""
        number, global_number = self.ranks[rank], self._global_ranks[rank]
        return f"rank {number}" + (f" (global rank {global_number})" if global_number != number else "")

    def report_to(self, tracer: Tracer, owner: str) -> None:
        """Notify the observers of another tracer, and name the `owner` of this group in events and errors."""
        self.tracer = tracer
        self.scope = f"{self.scope} of {owner}"

    def open(self) -> None:
        """Connect all ranks, unless there are too many. Collective."""
        self._check_open("opening the group")
        for transport in self._distinct:
            try:
                transport.open()
            except TransportError as error:
                self._fail_to_connect_all("opening the group", error)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The private torch group of all ranks, for the caller's own operations on CPU tensors.

        Observers are not notified of these operations. If the ranks are not connected yet, reading this property
        connects them, which is collective. Raises CommunicationError once the communicator is closed.
        """
        self.connect(None, "an operation")
        try:
            return self._transports["cpu"].torch_group()
        except TransportError as error:
            raise self.failure("an operation", str(error)) from error

    def silent_twin(self) -> "Communicator":
        """Return a communicator over the same connections for one more thread. Closing this one closes the twin too.

        The twin sends CPU tensors. It notifies no observers, since messages of two threads have no common order. Its
        messages need tags that this communicator does not use at the same time, that is, other pieces; see `Exchange`.
        Collective: it connects all ranks, if they are not connected yet.
        """
        purpose = "opening the group for one more thread"
        self._check_open(purpose)
        try:
            transport = self._transports["cpu"].twin()
        except LacksAbility as error:
            raise ValueError(f"torchbagua: {purpose}: {error}; the transport must implement `twin`") from error
        except TransportError as error:
            self._fail_to_connect_all(purpose, error)
        twin = copy.copy(self)
        twin.tracer, twin._launches = Tracer(), None
        twin._transports, twin._pending, twin._scratch, twin._twins = {"cpu": transport}, {}, {}, []
        self._twins.append(twin)
        return twin

    def use_transport(self, device_type: str, transport: Transport) -> None:
        """Use `transport` for the tensors of a device type from now on."""
        self._transports[device_type] = transport

    def watch_launches(self) -> None:
        """Record the operations launched in stream order from now on, for the thread that calls `poll`."""
        for transport in self._distinct:
            if transport.abilities.in_stream_order:
                self._launches = Launches(transport.name)

    def use_device(self, device: torch.device) -> None:
        """Prepare for tensors on `device`, once. Collective."""
        transport = self._transports.get(device.type)
        if transport is None or device in self._used_devices:
            return
        try:
            transport.use_device(device)
        except TransportError as error:
            raise self.failure(f"connecting {transport.name}", str(error)) from error
        self._used_devices.add(device)

    def poll(self) -> bool:
        """Return whether a GPU is still running an operation launched since `watch_launches`."""
        if self._launches is None:
            return False
        name = self._launches.transport_name
        try:
            launch = self._launches.first_unfinished()
        except RuntimeError as error:
            raise self.failure(f"an operation of {name}", cause_of(error)) from error
        if launch is not None and _concurrency.monotonic() > launch.at_s + self._timeout_s:
            cause = f"{name} did not finish within {self._timeout_s:g} s: a rank died or is blocked; {BUSY_ADVICE}"
            raise self.failure(launch.purpose, cause)
        return launch is not None

    def scratch(self, role: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for `role`, [num_bytes] uint8, as long as the longest part requested.

        A request of the same length returns the same tensor, unless a longer part was requested in between. The users
        of a group run one after the other, so each finds the memory still in the caches. On a GPU this holds per
        stream: FSDP gathers weights on one stream while it scatters gradients on another.
        """
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        parts = self._scratch.setdefault((role, stream), {})
        part = parts.get(num_bytes)
        if part is None or part.device != device:
            largest = parts[max(parts)] if parts else None
            if largest is None or largest.numel() < num_bytes or largest.device != device:
                parts.clear()
                largest = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            part = parts[num_bytes] = largest[:num_bytes]
        return part

    def in_stream_order(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent in current-stream order, without blocking the host."""
        return self._transport(device).abilities.in_stream_order

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if no transport supports tensors on `device`."""
        self._transport(device)

    @property
    def has_torch_group(self) -> bool:
        """Whether this communicator has a `torch_group`."""
        return self._transports["cpu"].abilities.has_torch_group

    @property
    def names_without_deadline(self) -> list[str]:
        """The names of transports whose waits may take longer than the timeout."""
        names = [transport.name for transport in self._distinct if not transport.abilities.has_deadline]
        return list(dict.fromkeys(names))  # a staged transport has the name of its host transport

    def missing_operation(self, device: torch.device) -> MissingOperation | None:
        """Return an operation on tensors on `device` that any rank lacks; None if none is missing. Collective.

        All ranks return the same value.
        """
        transport = self._transport(device)
        if transport.abilities.in_stream_order and device.type != "cuda":
            raise ValueError(
                f"torchbagua: a transport in stream order must serve tensors on cuda only, got {device.type} from "
                f"{transport.name}"
            )
        if not transport.abilities.has_messages:
            for collective in sorted(COLLECTIVES - transport.abilities.collectives):
                return MissingOperation(transport.name, collective, "its abilities do not include it")
        try:
            return transport.missing_operation()
        except TransportError as error:
            raise self.failure(f"trying the operations of {transport.name}", str(error)) from error

    def posts_messages(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent as messages, by `post` and `wait`, and not as one collective."""
        return self._transport(device).abilities.has_messages

    def has_all_reduce(self, device: torch.device) -> bool:
        """Return whether the transport of tensors on `device` has a native all-reduce."""
        return "all_reduce" in self._transport(device).abilities.collectives

    def all_reduce(self, tensor: torch.Tensor, purpose: str, messages: Messages) -> None:
        """Replace `tensor` with its sum over the ranks, by a collective of the transport, as the following methods."""
        self._launch(tensor.device, lambda transport: transport.all_reduce(tensor), purpose, messages)

    def all_to_all(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], purpose: str, messages: Messages
    ) -> None:
        """Send `inputs[r]` to each rank r and receive `outputs[r]` from it."""
        self._launch(inputs[0].device, lambda transport: transport.all_to_all(outputs, inputs), purpose, messages)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, purpose: str, messages: Messages) -> None:
        """Send each rank its equal part of `input`, and receive all ranks' parts."""
        self._launch(input.device, lambda transport: transport.all_to_all_single(output, input), purpose, messages)

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor, purpose: str, messages: Messages) -> None:
        """Gather all ranks' `own` into `output`; `own` may be a part of `output`."""
        self._launch(own.device, lambda transport: transport.all_gather_into_tensor(output, own), purpose, messages)

    def _launch(
        self, device: torch.device, collective: Callable[[Transport], None], purpose: str, messages: Messages
    ) -> None:
        transport = self._transport(device)
        spans = () if self.tracer.is_idle else messages()
        for span in spans:
            span.begin()
        try:
            collective(transport)
        except TransportError as error:
            cause = str(error)
        else:
            for span in spans:
                span.end()
            if self._launches is not None and transport.abilities.in_stream_order:
                self._launches.note(purpose, device)
            return
        self._fail(purpose, cause)

    def connect(self, peers: Iterable[int] | None, purpose: str, device: torch.device = _HOST) -> None:
        """Connect to ranks before posting messages to them. The peers call it too, in the same exchange."""
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
        """Start to send `tensor` to `peer`, or to receive it from `peer`. Does nothing if the tensor is empty."""
        if not tensor.numel():
            return
        self._check_open(purpose)
        transport = self._transport(tensor.device)
        posted_s = _concurrency.perf_counter()  # before data can arrive
        self._pending[tag, direction, peer] = transport, tensor, posted_s
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
        """Wait until the message posted with these arguments is done. Does nothing if no message was posted."""
        self._check_open(purpose)
        pending = self._pending.pop((tag, direction, peer), None)
        if pending is None:
            return
        transport, tensor, posted_s = pending
        try:
            if direction == "sending to":
                transport.wait_send(peer, tag)
                return
            transport.wait_receive(peer, tag)
            seconds = _concurrency.perf_counter() - posted_s
            if tensor.nbytes > SMALL_MESSAGE_BYTES and seconds > 0:
                self.link_bytes_per_s[peer] = max(self.link_bytes_per_s[peer], tensor.nbytes / seconds)
            return
        except TransportError as error:
            cause = str(error)
        self._fail(purpose, cause, direction, peer)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, which sets this before it aborts operations in flight."""
        return bool(self._ends)

    @property
    def collectively_closed_transports(self) -> list[Transport]:
        """The transports that members close together; see `Transport.close`."""
        return [transport for transport in self._distinct if transport.abilities.has_collective_close]

    def close(self, failure: CommunicationError | None = None) -> None:
        """Close the connections. Peers that still wait for this rank get an error at once.

        If `failure` is given, later operations, on other threads too, raise an error with its message.

        A wait in progress on another thread may keep the connections open until it ends. Operations in flight in stream
        order over a private transport are aborted; `join` waits for the abort.
        """
        self._ends.append("" if failure is None else str(failure))
        for transport in self._distinct:
            transport.abort()
        self._pending.clear()  # only now: an operation in flight may have written to these tensors
        for twin in self._twins:
            twin.close(failure)

    def interrupt(self) -> None:
        """End the waits of other threads, here and on the peers, if the transports can; then call `close`."""
        for transport in self._distinct:
            transport.interrupt()

    def join(self) -> None:
        """Wait a bounded time, a few seconds, for the operations that `close` aborted to end."""
        for transport in self._distinct:
            transport.join()
        for twin in self._twins:
            twin.join()

    @property
    def _distinct(self) -> list[Transport]:
        """The transports without duplicates: one transport may serve several device types."""
        return list(dict.fromkeys(self._transports.values()))

    def _transport(self, device: torch.device) -> Transport:
        transport = self._transports.get(device.type)
        if transport is not None:
            return transport
        host = self._transports["cpu"]
        stages = "cuda" not in self._transports and host.abilities.has_messages
        if not stages or device.type != "cuda":
            supported = sorted({*self._transports, "cuda"} if stages else self._transports)
            raise ValueError(
                f"torchbagua: tensors must be on {' or '.join(supported)}, got a tensor on {device}, for which the "
                f"process group has no backend; pass init_process_group a backend for {device.type}"
            )
        from torchbagua.transport.staged import StagedTransport

        transport = self._transports["cuda"] = StagedTransport(host, timedelta(seconds=self._timeout_s))
        return transport

    def _check_open(self, purpose: str) -> None:
        if self._ends:
            raise CommunicationError(self._ends[0]) if self._ends[0] else self.failure(purpose, "the group is closed")

    def _fail_to_connect_all(self, purpose: str, error: TransportError) -> NoReturn:
        self._check_open(purpose)  # another thread may have closed the group in the meantime
        raise CommunicationError(
            f"torchbagua: the {self.scope} group of ranks {list(self.ranks)} could not be opened on "
            f"{self.name_of(self.rank)} within {self._timeout_s:g} s; restart all ranks: {error}"
        ) from error

    def _fail(self, purpose: str, cause: str, direction: Direction | None = None, peer: int | None = None) -> NoReturn:
        # Closing the connections notifies the other ranks. The error's traceback keeps its frames alive, and these must
        # not keep the connections open: no frame has the group or a work in a variable at this point.
        if self._ends and self._ends[0]:  # another thread has closed the connections
            raise CommunicationError(self._ends[0])
        if "by peer" in cause:
            cause += "; a rank has failed, or has ended after fewer backward passes or steps than this one"
        if "imed out" in cause:
            who = "a rank" if peer is None else self.name_of(peer)
            cause += f"; {who} has not communicated for {self._timeout_s:g} s: {BUSY_ADVICE}"
        failure = self.failure(purpose, cause, "" if peer is None else f" {direction} {self.name_of(peer)}")
        self.close(failure)
        raise failure


class RingMessage:
    """A message to the rank `distance` places after this one, and one from the rank as far before, in flight.

    An empty tensor is not sent. Observers are notified if there is a name for them; otherwise the message may overlap
    with others, and its spans would not nest.
    """

    def __init__(
        self,
        communicator: Communicator,
        own: torch.Tensor,
        theirs: torch.Tensor,
        purpose: str,
        channel: int,
        distance: int = 1,
        observed_name: str | None = None,
    ) -> None:
        self._communicator = communicator
        self._own, self._theirs = own, theirs
        self._purpose = purpose
        self._tag = tag_of("agreement", channel)
        self._target, self._source = communicator.rank_after(distance), communicator.rank_before(distance)
        self._is_posted = communicator.posts_messages(own.device)
        self._send_span = self._receive_span = NO_SPAN
        if observed_name is not None and not communicator.tracer.is_idle:
            self._send_span, self._receive_span = self._spans(observed_name)
        if self._is_posted:
            communicator.connect([self._target, self._source], purpose)
            communicator.post("receiving from", self._source, theirs, tag=self._tag, purpose=purpose)
            self._send_span.begin()
            communicator.post("sending to", self._target, own, tag=self._tag, purpose=purpose)
        else:
            sent, received = ([own.new_empty(0) for _ in range(communicator.size)] for _ in range(2))
            sent[self._target], received[self._source] = own, theirs
            communicator.all_to_all(received, sent, purpose, lambda: (self._send_span, self._receive_span))

    def _spans(self, name: str) -> tuple[Span, Span]:
        details = Details("agreement", name, raw_bytes=self._own.nbytes, wire_bytes=self._own.nbytes)
        message_span, on_host = self._communicator.message_span, self._is_posted
        return (
            message_span("send", self._target, details, on_host=on_host),
            message_span("receive", self._source, details, on_host=on_host),
        )

    def receive(self) -> torch.Tensor:
        """Wait for both messages, and return the received one."""
        if self._is_posted:
            with self._receive_span:
                self._communicator.wait("receiving from", self._source, tag=self._tag, purpose=self._purpose)
            self._communicator.wait("sending to", self._target, tag=self._tag, purpose=self._purpose)
            self._send_span.end()
        return self._theirs


class TransportChoice:
    """Opens transports for communicators over ranks of one torch group.

    CPU tensors are sent over private gloo connections. GPU tensors are sent over NCCL if the group has NCCL, and
    through host memory otherwise. If the group has another backend for a device type, tensors on these devices are
    sent over a private group with that backend.
    """

    _shares_nccl = False

    def __init__(self, process_group: dist.ProcessGroup, given: TransportMaker | None) -> None:
        self._given = given
        self._process_group = process_group
        self._has_nccl = has_nccl(process_group)
        backends = backend_names(process_group)
        self._other_backends = {device: name for device, name in backends.items() if name not in ("gloo", "nccl")}

    def open(self, members: Members) -> dict[str, Transport]:
        """Return transports of these members, by device type.

        If the members are all ranks of the group, they use the group's own NCCL, on which training launches too.
        """
        device_transports = {} if self._given is None else self._open_given(members)
        for device_type, name in self._other_backends.items():
            if device_type not in device_transports:
                from torchbagua.transport.torch_backend import TorchBackendTransport

                store = dist.PrefixStore(f"{name} for {device_type}", members.store)
                device_transports[device_type] = TorchBackendTransport(replace(members, store=store), device_type)
        host = device_transports.get("cpu") or GlooTransport(members)
        transports = {"cpu": host, **device_transports}
        if "cuda" in transports or not self._has_nccl:  # without NCCL, the communicator stages tensors of GPUs
            return transports
        if members.size == self._process_group.size():
            from torchbagua.transport.nccl import NcclTransport

            self._shares_nccl = True
            transports["cuda"] = NcclTransport(self._process_group)
        else:
            transports["cuda"] = self._private_nccl(members)
        return transports

    @property
    def shares_users_group(self) -> bool:
        """Whether `open` has returned transports that launch on the user's NCCL."""
        return self._shares_nccl

    def open_for_another_thread(self, members: Members) -> dict[str, Transport]:
        """Return transports for a thread other than the training thread; they replace the transports that both share.

        The training thread launches on the user's group. Operations that another thread launched on that group would
        interleave with them in a different order on each rank.
        """
        if not self._shares_nccl:
            return {}
        from torchbagua.transport.nccl import warn_of_launch_order

        warn_of_launch_order()
        return {"cuda": self._private_nccl(members)}

    def open_in_stream_order(self, members: Members) -> dict[str, Transport]:
        """Return private transports that send tensors in stream order; none if all tensors are sent by the host."""
        return {"cuda": self._private_nccl(members)} if self._shares_nccl else {}

    def within(self, part: Members) -> TransportMaker | None:
        """Return the `given` of a group built from `part`, so that it uses the same transport as this group."""
        maker = self._given
        if maker is None and self._other_backends:
            from torchbagua.transport.torch_backend import TorchBackendTransport

            accelerators = [device_type for device_type in self._other_backends if device_type != "cpu"]
            maker = partial(TorchBackendTransport, device_type=accelerators[0] if accelerators else "cpu")
        if maker is None:
            return None

        def open_within(members: Members) -> Transport:
            ranks, global_ranks = (
                tuple(numbers[rank] for rank in members.ranks) for numbers in (part.ranks, part.global_ranks)
            )
            return maker(replace(members, process_group=part.process_group, ranks=ranks, global_ranks=global_ranks))

        return open_within

    def _private_nccl(self, members: Members) -> Transport:
        from torchbagua.transport.nccl import PrivateNcclTransport

        return PrivateNcclTransport(replace(members, store=dist.PrefixStore("nccl", members.store)))

    def _open_given(self, members: Members) -> dict[str, Transport]:
        assert self._given is not None
        transport = self._given(replace(members, store=dist.PrefixStore("given", members.store)))
        abilities, name = getattr(transport, "abilities", None), getattr(transport, "name", None)
        if not isinstance(abilities, Abilities) or not isinstance(name, str):
            raise TypeError(
                "BaguaProcessGroup: transport must return a torchbagua.transport.Transport with a name and Abilities, "
                f"got {transport!r} with the name {name!r} and the abilities {abilities!r}"
            )
        return dict.fromkeys(abilities.devices, transport)


def has_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether this group uses NCCL for GPU tensors."""
    return is_nccl(backend_of(process_group, "cuda"))


def default_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dict[str, tuple[dist.ProcessGroup.BackendType, Any]]:
    """Return backends with their kinds, by device type: gloo for CPUs, and NCCL if it and a GPU are available."""
    kinds = dist.ProcessGroup.BackendType
    requests = StoreRequests(store, timeout)
    gloo = requests.open_group(lambda store: dist.ProcessGroupGloo(store, rank, size, timeout))
    backends: dict[str, Any] = {"cpu": (kinds.GLOO, gloo)}
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        backends["cuda"] = (kinds.NCCL, nccl)
    return backends
