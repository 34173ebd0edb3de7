"""BaguaProcessGroup: a torch process group, the nodes of its ranks, and private groups for a lane."""

import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua._torch import backend_of, timeout_of
from torchbagua._warnings import warn_user
from torchbagua.collectives.board import StoreBoard
from torchbagua.collectives.clock import clock_of_machine, clock_offset
from torchbagua.collectives.group_operations import GroupOperations
from torchbagua.collectives.nodes import number_given_nodes
from torchbagua.collectives.overlapping import Overlap
from torchbagua.collectives.private_communicators import PrivateCommunicators
from torchbagua.collectives.store_agreement import Introduction, Settings, Verdict, agree_over_store
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import ClockOffset, Observer, check_observers
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.base import Members, TransportMaker
from torchbagua.transport.choice import TransportChoice
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, OutOfStep, cause_of
from torchbagua.transport.store_requests import SilentStoreError, StoreRequests, require_store
from torchbagua.version import __version__

# The key in the group's store of the reason for which a rank has closed its groups.
_REASON = "reason"
# A key, and the word under it if no rank has failed.
_ALL_ARE_OPEN = "all are open"
_OPEN = "open"


class BaguaProcessGroup(GroupOperations, PrivateCommunicators):
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
        board: the board on which ranks post texts for each other.
        compares_clocks: whether an observer of any rank needs the offsets between the ranks' clocks.
        clock_offsets: the offsets to add to this rank's clock to get rank 0's; an entry for each comparison of clocks.
        fitting_topologies: topologies that were checked to fit the ranks, or the nodes.
        num_shards: the smallest number of ranks on a node. A tensor is split into as many shards between nodes.
        world: the private group over all ranks.
        overlap: the state that overlapping means over `world` share.
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
        super().__init__()
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
        self.tracer = Tracer(observers)
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
        self.board = StoreBoard(self._store, self.rank, self.size, self.timeout)
        self.nodes = given_nodes or verdict.nodes
        self.node_ranks: list[list[int]] = [[] for _ in range(max(self.nodes) + 1)]
        for rank, node in enumerate(self.nodes):
            self.node_ranks[node].append(rank)
        self.num_shards = min(len(ranks) for ranks in self.node_ranks)
        self.intra_node = None
        self.inter_node = None
        self._is_open = False
        self._is_on_lane = False
        self.global_ranks = list(global_ranks or _ranks_in_job(process_group))
        self.world = self._communicator("world", "world", list(range(self.size)))
        self.overlap = Overlap(self.world)
        self._describe_node_groups()

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
            own_rank = _ranks_in_job(self.process_group)[self.rank]
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
            for communicator in self._communicators:
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

    def _describe_node_groups(self) -> None:
        """Set the groups within and between nodes, if there are several nodes and one of them has several ranks."""
        if not 1 < len(self.node_ranks) < self.size:
            return
        node = self.nodes[self.rank]
        shard = self.node_ranks[node].index(self.rank)
        self.intra_node = self._communicator("intra_node", f"node{node}", self.node_ranks[node])
        if shard < self.num_shards:
            owners = [ranks[shard] for ranks in self.node_ranks]
            self.inter_node = self._communicator("inter_node", f"shard{shard}", owners)

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
        self._gradients = Communicator(members, "intra_node", self.tracer, transports)
        if transports:
            (transport,) = transports.values()
            by_hand, within = transport.torch_group(), None
        else:
            by_hand = dist.ProcessGroup(members.store, members.rank, members.size)
            within = self._choice.within(members)
        return BaguaProcessGroup(by_hand, timeout=self.timeout, transport=within, global_ranks=members.global_ranks)

    def move_to_lane(self) -> None:
        """Communicate on the lane's thread from now on; the lane calls `poll`."""
        self._is_on_lane = True
        members = self._members("world", list(range(self.size)))
        for device_type, transport in self._choice.open_for_another_thread(members).items():
            self.world.use_transport(device_type, transport)
        for communicator in self._communicators:
            communicator.watch_launches()

    @property
    def launches_on_users_group(self) -> bool:
        """Whether it launches on the user's group, which `close` leaves open, so that other ranks still wait."""
        return self._choice.shares_users_group and not self._is_on_lane

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


def _ranks_in_job(process_group: dist.ProcessGroup) -> list[int]:
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
