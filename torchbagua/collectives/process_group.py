"""BaguaProcessGroup: a torch process group, the nodes of its ranks, and private groups for a lane."""

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._torch import backend_of, timeout_of
from torchbagua._warnings import warn_user
from torchbagua.codecs.base import Compressor, TensorSpec
from torchbagua.collectives.agreement import (
    Introduction,
    Settings,
    Verdict,
    agree_over_store,
    all_reduce_max,
    number_given_nodes,
)
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.exchange import Overlap
from torchbagua.collectives.mean import Mean
from torchbagua.collectives.operations import GroupOperations
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import ClockOffset, Observer
from torchbagua.observe.tracer import Tracer, check_observers
from torchbagua.transport.base import Members, TransportError, TransportMaker
from torchbagua.transport.communicator import Communicator, TransportChoice
from torchbagua.transport.errors import CommunicationError, OutOfStep, cause_of
from torchbagua.transport.store_requests import SilentStoreError, StoreRequests, require_store
from torchbagua.transport.streams import wait_on_host
from torchbagua.version import __version__

# A wait for the GPU ends this much later than the lane's `poll` of its operations, whose error names the operation.
_POLL_MARGIN_S = 1.0

# The key in the group's store of the reason for which a rank has closed its groups.
_REASON = "reason"

# A key, and the word under it if no rank has failed.
_ALL_ARE_OPEN = "all are open"

_OPEN = "open"


class PrivateGroups:
    """The communicators of a group: prepared for devices, polled and closed together.

    Attributes:
        communicators: the communicators. The first one has all ranks.
        timeout: the longest wait for another rank.
        device: the device for which they were last prepared.
    """

    def __init__(self, world: Communicator, timeout: timedelta) -> None:
        self.communicators = [world]
        self.timeout = timeout
        self.device = torch.device("cpu")

    def use_device(self, device: torch.device) -> None:
        """Connect the private groups for tensors on `device`, if they are not connected yet. Collective."""
        self.device = device
        for communicator in self.communicators:
            try:
                communicator.use_device(device)
            except CommunicationError:
                self.close()
                raise

    def check_operations(self, device: torch.device, algorithm: str) -> None:
        """Raise the same error on all ranks if a backend lacks an operation for tensors on `device`. Collective."""
        missing = self.communicators[0].missing_operation(device)
        if missing is not None:
            raise ValueError(
                f"torchbagua: backend {missing.backend} has no {missing.operation}, which {algorithm} needs for "
                f"tensors on {device.type}: {missing.cause}"
            )

    def poll(self) -> bool:
        """Return whether a GPU is still working on operations that were launched since `launch_on_lane`."""
        are_in_flight = [communicator.poll() for communicator in self.communicators]  # every poll drops finished work
        return any(are_in_flight)

    def wait_for_gpu(self, device: torch.device, purpose: str) -> None:
        """Block the host until the current stream of a GPU has finished. Does nothing on the CPU."""
        if device.type != "cuda":
            return
        try:
            wait_on_host(torch.cuda.current_stream(device).record_event(), self.timeout.total_seconds())
        except TimeoutError as error:
            self.poll()
            raise self.communicators[0].failure(purpose, cause_of(error)) from error
        self.poll()  # drops finished operations

    def wait_for_mark(self, mark: torch.cuda.Event, check: Callable[[], object] = lambda: None) -> bool:
        """Block the host until a GPU has reached `mark`. Call `check` repeatedly, which may raise. For any thread.

        Return False if the private groups are closed: an abort lets the GPU reach `mark` early, with partial results.
        """
        try:
            wait_on_host(mark, self.timeout.total_seconds() + _POLL_MARGIN_S, check)
        except TimeoutError as error:
            raise self.communicators[0].failure("waiting for the GPU", cause_of(error)) from error
        return not any(communicator.is_closed for communicator in self.communicators)

    def end_in_order(self) -> None:
        """Finish all in-flight operations in stream order, and close their transports. Collective.

        If a rank does not call it, `close` aborts the operations, since a GPU would wait for a rank that died.
        """
        private = [
            transport
            for communicator in self.communicators
            for transport in communicator.collectively_closed_transports
        ]
        if not private:
            return
        name = private[0].name
        with suppress(CommunicationError):
            # A barrier, which raises if a rank died.
            all_reduce_max(self.communicators[0], [0], f"closing the {name} groups")
            try:
                for transport in private:
                    transport.close()
            except TransportError as error:
                warn_user(f"torchbagua: {error}; aborting the {name} groups")

    def close(self) -> None:
        """Close the private groups, even with operations in flight. This aborts the operations of GPUs."""
        for communicator in self.communicators:
            communicator.close()
        for communicator in self.communicators:  # after all are aborted, since one may wait for another
            communicator.join()

    def abandon(self) -> None:
        """Close the private groups while another thread waits for a rank over them; the wait ends with an error."""
        for communicator in self.communicators:
            communicator.interrupt()
        self.close()


def clock_of_machine() -> str | None:
    """Return a name for the clock that this process reads; None if unknown. Processes of one kernel share the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class StoreBoard:
    """See `torchbagua.observe.events.Board`. A slot uses one store key per rank, however often its text changes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = StoreRequests(dist.PrefixStore("board", store), timeout)
        self._rank = rank
        self._size = size

    def put(self, slot: int, text: str) -> None:
        """Replace this rank's text in `slot`."""
        self._store.set(f"{slot}/{self._rank}", text)

    def get(self, slot: int) -> list[str] | None:
        """Return all ranks' texts in `slot`, in rank order; None if a rank has not put a text there yet."""
        keys = [f"{slot}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # `get` would block
            return None
        return self._store.read_texts(keys)


class BaguaProcessGroup:
    """The ranks of a torch process group, sorted into nodes, with private groups over all ranks and by node.

    `attach` constructs one from the process group of the module. Construct one yourself to assign ranks to nodes.
    Construction is collective: every rank of `process_group` constructs it, in the same order. The private groups are
    opened by `open`, or when an operation of this group first needs them; an attachment opens separate groups.

    The methods `all_reduce`, `all_gather`, `reduce_scatter` and `exchange` are for custom algorithms. All ranks call
    the same methods, in the same order, with tensors of the same sizes. Call them only from the operations of a bucket,
    which run on the lane. They work with tensors on CPUs and GPUs; in stream order no host waits. Observers are
    notified of every message. They raise CommunicationError if a rank disconnects or does not take part within the
    timeout.

    Args:
        process_group: a torch ProcessGroup that has a store: the world, a group from `new_group`, or a group that you
            constructed.
        nodes: the node of each rank: a list with a label for each rank. By default, host names identify nodes. Pass it
            if host names are misleading, as in containers and network namespaces.
        timeout: the longest wait for another rank, in construction and afterwards; by default that of `process_group`.
        observers: notified of every phase of communication over the private groups.
        transport: opens the transport that sends tensors, instead of the transport that fits the backends of
            `process_group`; see `torchbagua.transport`. The same on all ranks.
        rank_invariants: further values that must be the same on all ranks, by their names in errors.
        refusal: an UncompressedParametersWarning that a filter turns into an error on this rank; all ranks then raise
            it.
        global_ranks: the number of each rank in the whole job, for errors; by default torch's. A group that was
            constructed by hand needs it, since torch does not know it.

    Attributes:
        process_group: the torch group, over which DDP communicates too.
        timeout: the longest wait for another rank.
        transport: the argument.
        id: a name of the group, the same on all ranks and different for each group.
        rank: the number of this rank in `process_group`.
        size: the number of ranks.
        global_ranks: the number of each rank in the whole job.
        nodes: the number of each rank's node; nodes are numbered in the order of first appearance.
        node_ranks: for each node, its ranks in ascending order.
        tracer: notifies the observers of communication over the private groups.
        compares_clocks: whether an observer of any rank needs the offsets between the ranks' clocks.
        clock_offsets: the offsets to add to this rank's clock to get rank 0's; an entry for each comparison of clocks.
        fitting_topologies: topologies that were checked to fit the ranks, or the nodes.
        num_shards: the smallest number of ranks on a node. A tensor is split into as many shards between nodes.
        private: all private groups.
        world: the private group over all ranks.
        intra_node: the private group over the ranks of this node; None with one node, or one rank on each.
        inter_node: the private group over the ranks that own the same shard, one on each node; None with one node, or
            one rank on each, or if this rank owns no shard.

    Raises:
        TypeError, ValueError: an argument does not fit, or ranks disagree on `nodes`, the package's version or
            `rank_invariants`.
        UncompressedParametersWarning: a rank has a `refusal`.
        TimeoutError: a rank did not construct it in time.
        CommunicationError: the store did not answer in time, or an exception has ended the wait of another rank.
    """

    _is_open = False
    _is_on_lane = False

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        nodes: Sequence[str | int] | None = None,
        timeout: timedelta | None = None,
        observers: Sequence[Observer] = (),
        transport: TransportMaker | None = None,
        rank_invariants: Settings | None = None,
        refusal: str | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"BaguaProcessGroup: process_group must be a torch.distributed.ProcessGroup, got {process_group!r}"
                f"{'; call init_process_group first' if process_group is None else ''}"
            )
        check_observers("BaguaProcessGroup", observers)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            got = f"{timeout.total_seconds():g} s" if isinstance(timeout, timedelta) else repr(timeout)
            raise ValueError(f"BaguaProcessGroup: timeout must be a positive datetime.timedelta, got {got}")
        if transport is not None and not callable(transport):
            raise TypeError(
                "BaguaProcessGroup: transport must be callable, such as a class of torchbagua.transport, got "
                f"{transport!r}"
            )
        self.process_group = process_group
        self._group_store = require_store(process_group)
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.timeout = timeout or timeout_of(process_group)
        self.transport = transport
        self._choice = TransportChoice(process_group, transport)
        self._observers = tuple(observers)
        self.tracer = _tracer_of(observers)
        self.clock_offsets: list[ClockOffset] = []
        self.fitting_topologies: list[tuple[Topology, bool]] = []
        given_nodes = None if nodes is None else number_given_nodes(nodes, self.size)
        same = {
            "BaguaProcessGroup's argument nodes": given_nodes,
            "BaguaProcessGroup's argument transport": _name_of(transport),
        }
        verdict = self._agree({**same, **(rank_invariants or {})}, refusal)
        self.id = verdict.id
        # If an observer of one rank needs it, all ranks have to take part.
        self.compares_clocks = verdict.compares_clocks
        self._other_clocks = verdict.other_clocks
        self.nodes = given_nodes or verdict.nodes
        self.node_ranks: list[list[int]] = [[] for _ in range(max(self.nodes) + 1)]
        for rank, node in enumerate(self.nodes):
            self.node_ranks[node].append(rank)
        self.num_shards = min(len(ranks) for ranks in self.node_ranks)
        self.global_ranks = list(global_ranks or ranks_in_job(process_group))
        self.world = self._communicator("world", "world", list(range(self.size)))
        self.private = PrivateGroups(self.world, self.timeout)
        self.intra_node, self.inter_node = self._node_groups()

    @cached_property
    def board(self) -> StoreBoard:
        """The board on which ranks post texts for each other."""
        return StoreBoard(self._store, self.rank, self.size, self.timeout)

    @cached_property
    def overlap(self) -> Overlap:
        """The state that the overlapping means over `world` share. The thread that runs them begins and ends them."""
        return Overlap(self.world)

    # Operations, for custom algorithms.

    @cached_property
    def _operations(self) -> GroupOperations:
        return GroupOperations(self)

    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        average: bool = False,
        compression: str | Compressor | None = None,
        hierarchical: bool = True,
        name: str = "all_reduce",
    ) -> torch.Tensor:
        """Replace `x` by its sum over the ranks, and return it. The result is bitwise equal on all ranks.

        Args:
            x: a contiguous tensor of any shape, floating-point or complex.
            average: divide by the number of ranks.
            compression: the codec, see `BaguaBucket.append_centralized_synchronous_op`.
            hierarchical: in a multi-node group, sum within nodes in full precision, and use `compression` between
                nodes.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` does not meet these requirements, or `compression` does not encode its dtype.
        """
        return self._operations.all_reduce(
            x, average=average, compression=compression, hierarchical=hierarchical, name=name
        )

    def all_gather(self, x: torch.Tensor, *, name: str = "all_gather") -> torch.Tensor:
        """Return the `x` of all ranks in rank order, of shape [R, *x.shape] with R ranks.

        Args:
            x: a contiguous tensor. Its dtype and shape are the same on all ranks.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` is not contiguous.
        """
        return self._operations.all_gather(x, name=name)

    def reduce_scatter(self, x: torch.Tensor, *, average: bool = False, name: str = "reduce_scatter") -> torch.Tensor:
        """Return the sum over the ranks of `x[rank]`, this rank's part of `x`. `x` is unchanged.

        Values are summed in rank order, in float32, or in float64 if `x` is float64.

        Args:
            x: a contiguous tensor of shape [R, ...] with R ranks, floating-point or complex.
            average: divide by the number of ranks.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` does not meet these requirements.
        """
        return self._operations.reduce_scatter(x, average=average, name=name)

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        name: str = "exchange",
    ) -> None:
        """Send a tensor to each of several ranks, and receive one from each of several ranks.

        If you send to a rank, that rank must receive the same number of bytes from you. If the numbers differ, a
        transport may end the process.

        Args:
            sends: contiguous tensors, by the rank that receives them.
            receives: contiguous tensors to fill, by the rank that sends them.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: a tensor is not contiguous, or a key is not another rank of the group.
        """
        self._operations.exchange(sends, receives, name=name)

    def mean_over_nodes(
        self,
        compressor: Compressor,
        spec: TensorSpec,
        divisor: float,
        intra_compressor: Compressor,
        residuals: TwoPhaseResiduals | None,
    ) -> Mean:
        """Return the function that sums within nodes, and then averages between nodes; see `centralized_mean`."""
        from torchbagua.collectives.hierarchical import mean_over_nodes

        return mean_over_nodes(self, compressor, spec, divisor, intra_compressor, residuals)

    # How it is opened and closed.

    def _agree(self, same: Settings, refusal: str | None) -> Verdict:
        """Compare `same` and the package's version over all ranks, and return the verdict."""
        # Every rank constructs its groups in the same order, so each rank's count of them gives the same name.
        counter = f"torchbagua/constructed/{self.rank}"
        group_requests = StoreRequests(self._group_store, self.timeout)
        own = Introduction(
            settings={"the version of torchbagua": __version__, **same},
            host=socket.gethostname(),
            clock=clock_of_machine(),
            compares_clocks=self.tracer.compares_clocks,
            id=secrets.token_hex(8),
            refusal=refusal,
        )
        try:
            self._store = dist.PrefixStore(f"torchbagua/{group_requests.add(counter, 1)}", self._group_store)
            self._requests = StoreRequests(self._store, self.timeout)
            return agree_over_store(self._store, self.rank, self.size, own, self.timeout)
        except TimeoutError:
            group_requests.add(counter, -1)  # a missing rank has not counted it either: all ranks may retry
            raise
        except SilentStoreError as error:
            own_rank = ranks_in_job(self.process_group)[self.rank]
            raise CommunicationError(f"torchbagua: comparing settings failed on rank {own_rank}: {error}") from error

    def open(self) -> None:
        """Open the private groups now, instead of at their first use. Collective.

        In a group of more than 32 ranks, two ranks connect at their first message. In a smaller group all ranks connect
        now, so that the failure of a rank is detected at once.

        Raises:
            CommunicationError: a group could not be opened within the timeout.
        """
        if self._is_open:
            return
        self._is_open = True
        try:
            for communicator in self.private.communicators:
                communicator.open()
            self._wait_until_all_are_open()
            for name in self.world.names_without_deadline:
                warn_user(  # may raise; the other ranks do not block here, so they detect it at once
                    f"torchbagua: backend {name} does not bound its waits by timeout={self.timeout}: if a rank dies, "
                    "the other ranks may block forever. Have the launcher monitor the ranks"
                )
        except BaseException as error:
            self.close()
            cause = cause_of(error).removeprefix("torchbagua: ")
            self._requests.leave(_ALL_ARE_OPEN, f"{self.world.name_of(self.rank)} has left: {cause}")
            raise

    def _members(self, key: str, ranks: list[int]) -> Members:
        return Members(
            process_group=self.process_group,
            ranks=tuple(ranks),
            rank=ranks.index(self.rank),
            store=dist.PrefixStore(key, self._store),
            timeout=self.timeout,
            global_ranks=tuple(self.global_ranks[rank] for rank in ranks),
        )

    def _communicator(self, scope: str, key: str, ranks: list[int]) -> Communicator:
        members = self._members(key, ranks)
        return Communicator(members, scope, self.tracer, self._choice.open(members))

    def _node_groups(self) -> tuple[Communicator | None, Communicator | None]:
        """Return the groups within and between nodes, if there are several nodes and one of them has several ranks."""
        if not 1 < len(self.node_ranks) < self.size:
            return None, None
        node = self.nodes[self.rank]
        shard = self.node_ranks[node].index(self.rank)
        intra_node = self._communicator("intra_node", f"node{node}", self.node_ranks[node])
        self.private.communicators.append(intra_node)
        if shard >= self.num_shards:
            return intra_node, None
        owners = [ranks[shard] for ranks in self.node_ranks]
        inter_node = self._communicator("inter_node", f"shard{shard}", owners)
        self.private.communicators.append(inter_node)
        return intra_node, inter_node

    def _wait_until_all_are_open(self) -> None:
        """Wait for the slowest rank: a rank that closes its groups at once would break pending connections."""
        purpose = "opening private groups on all ranks"
        try:
            if self._requests.add("open", 1) == self.size:
                self._requests.set_first(_ALL_ARE_OPEN, _OPEN)
            self._requests.announce("is open", self.rank)
            self._requests.wait([_ALL_ARE_OPEN], self.timeout)
            outcome = self._requests.get(_ALL_ARE_OPEN)
        except RuntimeError as error:
            missing = [self.world.name_of(rank) for rank in self._requests.missing_ranks("is open", self.size)]
            whom = f", waiting for {', '.join(missing)}" if missing else ""
            raise self.world.failure(purpose, cause_of(error), whom) from error
        if outcome != _OPEN:
            raise self.world.failure(purpose, outcome)

    def open_gradient_group(self) -> "BaguaProcessGroup":
        """Return a group of the ranks of this node, which averages gradients concurrently with this group. Collective.

        It sends over the same kinds of transports as this group, and is closed with it.
        """
        node = self.nodes[self.rank]
        members = self._members(f"gradients of node{node}", self.node_ranks[node])
        transports = self._choice.open_in_stream_order(members)
        self.private.communicators.append(Communicator(members, "intra_node", self.tracer, transports))
        if transports:
            (transport,) = transports.values()
            by_hand, within = transport.torch_group(), None
        else:
            by_hand = dist.ProcessGroup(members.store, members.rank, members.size)
            within = self._choice.within(members)
        return BaguaProcessGroup(by_hand, timeout=self.timeout, transport=within, global_ranks=members.global_ranks)

    def launch_on_lane(self) -> None:
        """Have the lane's thread launch operations of a GPU, beside the training thread; the lane calls `poll`."""
        self._is_on_lane = True
        members = self._members("world", list(range(self.size)))
        for device_type, transport in self._choice.open_for_another_thread(members).items():
            self.world.use_transport(device_type, transport)
        for communicator in self.private.communicators:
            communicator.watch_launches()

    def report_to(self, tracer: Tracer, owner: str) -> None:
        """Notify another group's observers of communication over this group, and name its `owner` in errors."""
        self.tracer = tracer
        for communicator in self.private.communicators:
            communicator.report_to(tracer, owner)

    @property
    def device(self) -> torch.device:
        """The device for which the private groups were last prepared."""
        return self.private.device

    @property
    def launches_on_users_group(self) -> bool:
        """Whether it launches on the user's group, which `close` leaves open, so that other ranks still wait."""
        return self._choice.shares_users_group and not self._is_on_lane

    def close(self) -> None:
        """Close the private groups, even with operations in flight. This aborts the operations of GPUs."""
        self.private.close()

    def fail(self) -> None:
        """Close the private groups, since this rank has failed, and notify the ranks that wait for it."""
        self.announce_failure()
        self.close()

    def announce_failure(self) -> None:
        """Leave a reason in the store if the closed private groups do not notify all other ranks."""
        if self.launches_on_users_group:
            self.post_reason(f"torchbagua: {self.world.name_of(self.rank)} has raised an error, see its output")

    def look_for_failed_rank(self, is_stuck: Callable[[], bool]) -> None:
        """Raise CommunicationError if another rank has left a reason for which it has failed.

        If `is_stuck()`, the GPU waits for that rank on the user's group, which no rank can use any more: abort it, so
        that the host does not wait until the backend's watchdog ends the process.
        """
        reason = self._reason_of_another_rank()
        if reason is None:
            return
        if is_stuck():
            abort = backend_of(self.process_group, "cuda").abort
            # On another thread: it may wait for the GPU.
            _concurrency.Thread(target=abort, name="torchbagua: an abort of the user's group", daemon=True).start()
        raise OutOfStep(f"{reason}. {self.world.name_of(self.rank)} was averaging gradients with it")

    def compare_clocks(self) -> None:
        """Compare the clocks of the ranks and add to `clock_offsets`, if `compares_clocks`. Collective.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        if self.compares_clocks:
            from torchbagua.collectives.clock import clock_offset

            self.clock_offsets.append(clock_offset(self.world, self._other_clocks))

    def post_reason(self, text: str) -> None:
        """Leave in the store the reason for which this rank is about to close its groups. The first reason remains."""
        self._requests.leave(_REASON, f"{self.rank} {text}")

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`; if another rank has disconnected and left a reason, an error that begins with it."""
        is_disconnect = isinstance(error, CommunicationError) and "by peer" in str(error)
        reason = self._reason_of_another_rank() if is_disconnect else None
        return error if reason is None else OutOfStep(f"{reason}. Here, {str(error).removeprefix('torchbagua: ')}")

    def _reason_of_another_rank(self) -> str | None:
        posted = self._requests.peek(_REASON)
        if posted is None:
            return None
        rank, text = posted.split(" ", 1)
        return None if int(rank) == self.rank else text

    def duplicate(
        self,
        *,
        timeout: timedelta | None = None,
        observers: Sequence[Observer] = (),
        rank_invariants: Settings | None = None,
        refusal: str | None = None,
    ) -> "BaguaProcessGroup":
        """Return a group of the same ranks and nodes, with separate private groups, which are open. Collective.

        Args:
            timeout: the longest wait for another rank; by default that of this group.
            observers: further observers, in addition to those of this group.
            rank_invariants, refusal: as in the constructor.
        """
        group = BaguaProcessGroup(
            self.process_group,
            nodes=self.nodes,
            timeout=timeout or self.timeout,
            observers=[*self._observers, *observers],
            transport=self.transport,
            rank_invariants=rank_invariants,
            refusal=refusal,
            global_ranks=self.global_ranks,
        )
        group.open()
        return group


def _tracer_of(observers: Sequence[Observer]) -> Tracer:
    if not observers:
        return Tracer()
    from torchbagua.observe.observed import ObservedTracer

    return ObservedTracer(observers)


def ranks_in_job(process_group: dist.ProcessGroup) -> list[int]:
    """Return the number of each rank in the whole job; in a group that was built by hand, its number in the group."""
    try:
        return dist.get_process_group_ranks(process_group)
    except KeyError:  # torch does not know a group that was constructed by hand
        return list(range(process_group.size()))


def _name_of(transport: TransportMaker | None) -> str | None:
    """Return a name of the kind of transport, for comparison between ranks."""
    if isinstance(transport, partial):
        named = sorted(transport.keywords.items())
        plain = (f"{name}={value!r}" for name, value in named if isinstance(value, str | int | float | None))
        return f"{_name_of(transport.func)}({', '.join(plain)})"
    return None if transport is None else getattr(transport, "__qualname__", type(transport).__qualname__)
