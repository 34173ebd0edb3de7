"""One group of ranks, and what they send each other: over a private gloo group, or over NCCL."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import NO_SPAN, Span, Tracer
from torchbagua.transport.connections import MOST_CONNECTED_AT_ONCE, Connections
from torchbagua.transport.errors import CommunicationError, cause_of
from torchbagua.transport.nccl import PrivateNccl
from torchbagua.transport.private_groups import all_gather_equal, all_reduce, all_to_all, all_to_all_equal
from torchbagua.transport.staging import Staging

# A shorter message tells little of a link's rate: it may be gone in one burst.
SMALL_MESSAGE_BYTES = 1 << 18

Direction = Literal["receiving from", "sending to", "connecting to"]


class _Pending(NamedTuple):
    work: dist.Work
    tensor: torch.Tensor
    posted_s: float


class Communicator:
    """A group of ranks that exchange tensors: over a private gloo group, and over `nccl`, which may be the user's.

    The gloo group is private (DDP communicates on the user's group from its own thread, and two users of one gloo group
    can deadlock), and every use must come in the same order on all its ranks: one lane, one thread. What lies on a GPU
    passes through pinned memory of the host, unless `nccl` moves it.

    Ranks are connected by `open`, or before their first exchange. Until then a communicator only says who is in it.

    Args:
        store: the key-value store that all `ranks` share, with keys of this group alone.
        rank: own index in `ranks`.
        ranks: the members, as ranks of the user's group; they name the peers in errors.
        scope: "world", "intra_node" or "inter_node", for events and errors.
        timeout: bound on every wait.
        tracer: hears of every phase of what is done over the group.
        nccl: a group of the same ranks that exchanges tensors of GPUs, where there is one.
        global_ranks: the numbers of the same ranks in the whole job, which errors add where they are others; None if
            they are not known.

    Attributes:
        tracer, nccl: the same.
        private_nccl: what `nccl` is where it is nobody else's, and closed with the communicator.
        link_bytes_per_s: for each rank, the best rate of a receive from it longer than SMALL_MESSAGE_BYTES, 0 before
            the first. Data are sent when their receive is posted and not before, so the link is at least as fast.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        ranks: Sequence[int],
        scope: str,
        timeout: timedelta,
        tracer: Tracer,
        nccl: dist.ProcessGroup | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._global_ranks = self.ranks if global_ranks is None else tuple(global_ranks)
        self._twins: list[Communicator] = []
        self._closed_by = ""
        self.scope = scope
        self.link_bytes_per_s = [0.0] * len(ranks)
        self.tracer = tracer
        self.nccl = nccl
        self.private_nccl: PrivateNccl | None = None
        self._timeout_s = timeout.total_seconds()
        self._staging = Staging(self._timeout_s)
        # A work holds the connections open, so what is posted and not waited for is kept where `close` ends it.
        self._pending: dict[tuple[int, Direction, int], _Pending] = {}
        # By the role, the stream and the number of bytes.
        self._scratch: dict[tuple[str, torch.cuda.Stream | None], dict[int, torch.Tensor]] = {}
        self._num_messages: Counter[tuple[str, int]] = Counter()
        self._connections = Connections(store, rank, len(ranks), timeout)

    def open(self) -> None:
        """Connect all ranks, if there are not too many. Collective.

        Raises:
            CommunicationError: they could not be connected within the timeout.
        """
        if self.size <= MOST_CONNECTED_AT_ONCE:
            self._open_mesh("opening the group")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def gloo(self) -> dist.ProcessGroup:
        """The private gloo group, for operations of one's own on tensors of the CPU, of which observers do not hear.

        It connects all ranks, which is collective, if they are not connected yet. Raises CommunicationError once it is
        closed.
        """
        return self._open_mesh("an operation")

    def silent_twin(self) -> "Communicator":
        """Return a communicator over the same connections of gloo, for one more thread; it is closed with this one.

        It tells no observer, since messages of two threads have no common order. It needs tags that this one does not
        use at the same time: other pieces, see `Exchange`. Collective: it connects all ranks, if they are not connected
        yet, since two threads cannot agree with those of another rank on who connects to whom first.

        Raises:
            CommunicationError: the ranks could not be connected within the timeout.
        """
        self._open_mesh("opening the group for one more thread")
        twin = copy.copy(self)
        twin.tracer, twin.nccl, twin.private_nccl = Tracer(()), None, None
        twin._staging, twin._pending, twin._scratch, twin._twins = Staging(self._timeout_s), {}, {}, []
        self._twins.append(twin)
        return twin

    def set_private_nccl(self, nccl: PrivateNccl) -> None:
        """Have NCCL move tensors of GPUs over this group."""
        self.nccl, self.private_nccl = nccl.group, nccl

    def launch(
        self, purpose: str, operation: Callable[[dist.ProcessGroup], None], messages: Callable[[], Sequence[Span]]
    ) -> None:
        """Launch an operation of NCCL on the current stream.

        Args:
            purpose: what for, in errors.
            operation: called with NCCL's group.
            messages: returns the messages of the operation, of which observers are told; called where somebody listens.

        Raises:
            CommunicationError: NCCL refuses, or the private group is closed; the user's own stays open. What fails
                later is found by who polls a private group, and by NCCL's own watchdog.
        """
        if self.nccl is None:
            raise self.failure(purpose, "the group is closed")
        spans = () if self.tracer.is_idle else messages()
        for span in spans:
            span.begin()
        try:
            operation(self.nccl)
        except RuntimeError as error:
            raise self.failure(purpose, cause_of(error)) from error
        for span in spans:
            span.end()
        if self.private_nccl is not None:
            self.private_nccl.note(purpose)

    def rank_before(self, distance: int) -> int:
        """Return the rank `distance` places before own, around the ring."""
        return (self.rank - distance) % self.size

    def rank_after(self, distance: int) -> int:
        """Return the rank `distance` places after own, around the ring."""
        return (self.rank + distance) % self.size

    def scratch(self, role: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for `role`, [num_bytes] uint8, that everybody who asks for that role shares.

        It is the same tensor as for whoever asked for as much before, unless more has been asked for since.

        Users of one group come one after the other, and what the last has left in the caches the next one finds there.
        On a GPU they do so on one stream each: FSDP gathers weights on one, while it scatters gradients on another.
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
        """Return whether tensors on `device` are moved in the order of the current stream: the host waits for none.

        Then an exchange is one collective. Otherwise messages are posted one by one, and the host waits for each.
        """
        return self.nccl is not None and device.type == "cuda"

    def posts_messages(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent by `post` and `wait`, one by one; else by one collective."""
        return not self.in_stream_order(device)

    def all_reduce(self, tensor: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]) -> None:
        """Replace `tensor` by its sum over the ranks, in stream order; see `launch`."""
        self.launch(purpose, lambda nccl: all_reduce(nccl, tensor), messages)

    def all_to_all(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        purpose: str,
        messages: Callable[[], Sequence[Span]],
    ) -> None:
        """Send `inputs[r]` to each rank r and receive `outputs[r]` from it, in stream order; see `launch`."""
        self.launch(purpose, lambda nccl: all_to_all(nccl, outputs, inputs), messages)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]
    ) -> None:
        """Send each rank its part of `input`, all of equal length, and receive theirs, in stream order; see `launch`."""
        self.launch(purpose, lambda nccl: all_to_all_equal(nccl, output, input), messages)

    def all_gather_into_tensor(
        self, output: torch.Tensor, own: torch.Tensor, purpose: str, messages: Callable[[], Sequence[Span]]
    ) -> None:
        """Receive all ranks' `own` in `output`, of which it may be a part, in stream order; see `launch`."""
        self.launch(purpose, lambda nccl: all_gather_equal(nccl, output, own), messages)

    def is_staged(self, device: torch.device) -> bool:
        """Return whether tensors on `device` pass through the host's memory, where gloo moves them."""
        return device.type == "cuda"

    def connect(self, peers: Iterable[int] | None, purpose: str) -> None:
        """Connect to ranks, before anything is posted to them. They call it too, in the same exchange.

        Args:
            peers: to whom; None for all ranks.
            purpose: what for, in errors.

        Raises:
            CommunicationError: a peer is gone, or did not call it within the group's timeout.
        """
        if peers is None:
            self._open_mesh(purpose)
            return
        self._check_open(purpose)
        failure = self._connections.connect(peers)
        if failure is not None:
            self._fail("connecting to", failure.peer, purpose, failure.cause)

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
        # The backend itself: the torch group's methods take a detour through the dispatcher.
        backend, number = self._connections.to(peer)
        post = backend.recv if direction == "receiving from" else backend.send
        key = (tag, direction, peer)
        assert key not in self._pending
        on_host = tensor
        if self.is_staged(tensor.device):
            get_host_memory = (
                self._staging.receive_buffer if direction == "receiving from" else self._staging.copy_to_host
            )
            try:
                on_host = get_host_memory(key, tensor)
            except TimeoutError as error:
                self._fail(direction, peer, purpose, cause_of(error))
        posted_s = time.perf_counter()  # before data can flow
        try:
            self._pending[key] = _Pending(post([on_host], number, tag), tensor, posted_s)
            return
        except RuntimeError as error:
            cause = cause_of(error)
        del backend, post
        self._fail(direction, peer, purpose, cause)

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
            pending.work.wait()
        except RuntimeError as error:
            cause = cause_of(error)
        else:
            if direction == "receiving from":
                if pending.tensor.nbytes > SMALL_MESSAGE_BYTES:
                    rate = pending.tensor.nbytes / (time.perf_counter() - pending.posted_s)
                    self.link_bytes_per_s[peer] = max(self.link_bytes_per_s[peer], rate)
                if self.is_staged(pending.tensor.device):
                    self._staging.copy_to_device((tag, direction, peer), pending.tensor)
            return
        del pending
        self._fail(direction, peer, purpose, cause)

    def span(self, phase: Phase, details: Details, *, on_host: bool = False) -> Span:
        """Return a phase of what is done over this group, which `details` need not name; see `Tracer.span`."""
        if self.tracer.is_idle:
            return NO_SPAN
        return self.tracer.span(phase, details._replace(scope=self.scope, ranks=self.ranks), on_host=on_host)

    def message_span(self, phase: Literal["send", "receive"], peer: int, details: Details, *, on_host: bool) -> Span:
        """Return a phase for one message to or from `peer`, of which the two sides must make equally many."""
        self._num_messages[phase, peer] = message = self._num_messages[phase, peer] + 1
        details = details._replace(peers=(self.ranks[peer],), message=message)
        return self.span(phase, details, on_host=on_host)

    def close(self, failure: CommunicationError | None = None) -> None:
        """Close the connections; peers that still wait for this rank get an error at once.

        If `failure` is why, all that is tried over them afterwards says so, on other threads too.

        A wait that is under way on another thread keeps them open until it ends. What NCCL has under way over a private
        group is broken off, for which its `join` waits.
        """
        if failure is not None:
            self._closed_by = str(failure)  # first: another thread may look as soon as it is closed
        self._connections.close()
        self._pending.clear()
        for twin in self._twins:
            twin.close(failure)
        if self.private_nccl is not None:
            self.nccl = None
            self.private_nccl.abort()

    def failure(self, purpose: str, cause: str, whom: str = "") -> CommunicationError:
        """Return the error that says that `purpose` has failed on this rank, " receiving from rank 3" say, and why."""
        own = self.name_of(self.rank)
        return CommunicationError(f"torchbagua: {purpose} over the {self.scope} group failed on {own}{whom}: {cause}")

    def name_of(self, rank: int) -> str:
        """Return "rank 1" for errors, or "rank 1 (global rank 3)" if its number in the whole job is another."""
        number, global_number = self.ranks[rank], self._global_ranks[rank]
        return f"rank {number}" + (f" (global rank {global_number})" if global_number != number else "")

    def _check_open(self, purpose: str) -> None:
        if self._connections.is_closed:
            if self._closed_by:
                raise CommunicationError(self._closed_by)
            raise self.failure(purpose, "the group is closed")

    def _open_mesh(self, purpose: str) -> dist.ProcessGroup:
        self._check_open(purpose)
        try:
            self._connections.open_mesh()
        except RuntimeError as error:
            raise CommunicationError(
                f"torchbagua: the {self.scope} group of ranks {list(self.ranks)} could not be opened on rank "
                f"{self.ranks[self.rank]} within {self._timeout_s:g} s; the ranks have to be started again: "
                f"{cause_of(error)}"
            ) from error
        mesh = self._connections.mesh
        if mesh is None:  # another thread has closed it meanwhile
            raise self.failure(purpose, "the group is closed")
        return mesh

    def _fail(self, direction: Direction, peer: int, purpose: str, cause: str) -> NoReturn:
        # Closing the connections is what tells the other ranks. The frames that the error's traceback keeps must not
        # hold them open, so none has the group or a work in a variable by now.
        if "by peer" in cause:
            cause += "; a rank has failed, or has ended after fewer backward passes or steps than this one"
        failure = self.failure(purpose, cause, f" {direction} {self.name_of(peer)}")
        self.close(failure)
        raise failure
