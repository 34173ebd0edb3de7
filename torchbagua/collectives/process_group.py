"""BaguaProcessGroup: a torch process group, the nodes its ranks are on, and private groups for a lane."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from torchbagua._torch import timeout_of
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
from torchbagua.transport.errors import cause_of
from torchbagua.transport.store_requests import require_store
from torchbagua.version import __version__


class BaguaProcessGroup(GroupOperations, PrivateCommunicators):
    """The ranks of a torch process group, sorted into nodes, with private groups over all ranks and by node.

    `attach` makes one from the group of the module. Make one yourself to say which rank is on which node. Construction
    is collective: every rank of `process_group` constructs it, in the same order. The private groups are opened by
    `open`, or when an operation of this group first needs them; an attachment opens groups of its own.

    Its methods `all_reduce`, `all_gather`, `reduce_scatter` and `exchange` are for algorithms of yours. All ranks call
    the same ones, in the same order, with tensors of the same sizes. Call them from the operations of a bucket only,
    which run on the lane. They work with tensors on CPUs and GPUs; in stream order no host waits. Observers are
    notified of every message. They raise CommunicationError if a rank is gone or does not take part within the timeout.

    Args:
        process_group: a torch ProcessGroup that has a store: the world, or one from `new_group`, or one that you made.
        nodes: which node each rank is on: a list with a label for each rank. By default nodes are told apart by host
            names. Give it where host names mislead, as in containers and network namespaces.
        timeout: the longest wait for another rank, in construction and after; by default that of `process_group`.
        observers: are told of every phase of communication over the private groups.
        transport: opens what moves tensors, in place of the transport that fits the backends of `process_group`; see
            `torchbagua.transport`. The same on all ranks.
        must_agree: further values that must be the same on all ranks, by the name that an error gives them.
        refusal: an UncompressedParametersWarning that a filter makes an error on this rank; all ranks then raise it.

    Attributes:
        process_group: the torch group, over which DDP communicates too.
        timeout: the longest wait for another rank.
        transport: the argument.
        id: a name of the group, the same on all ranks, and different for each group.
        rank: the number of this rank in `process_group`.
        size: the number of ranks.
        nodes: the number of each rank's node, numbered in the order of first appearance.
        node_ranks: for each node, its ranks in ascending order.
        tracer: tells the observers what is done over the private groups.
        board: where ranks leave texts for each other.
        compares_clocks: whether an observer of any rank needs to know how far the clocks of the ranks are apart.
        clock_offsets: what to add to this rank's clock for rank 0's; an entry for each comparison of clocks.
        fitting_topologies: topologies that were found to fit the ranks, or the nodes.
        num_shards: the smallest number of ranks on a node. A tensor is split into as many shards between nodes.
        world: the private group over all ranks.
        overlap: what means over `world` share that begin beside each other.
        intra_node: the private group over the ranks of this node; None with one node, or one rank on each.
        inter_node: the private group over the ranks that own the same shard, one on each node; None with one node, or
            one rank on each, or if this rank owns no shard.

    Raises:
        TypeError, ValueError: an argument does not fit, or ranks disagree in `nodes`, the package's version or
            `must_agree`.
        UncompressedParametersWarning: a rank has a `refusal`.
        TimeoutError: a rank did not construct it in time.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        nodes: Sequence[str | int] | None = None,
        timeout: timedelta | None = None,
        observers: Sequence[Observer] = (),
        transport: TransportMaker | None = None,
        must_agree: Settings | None = None,
        refusal: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"BaguaProcessGroup: process_group must be a torch.distributed.ProcessGroup, got {process_group!r}"
                f"{'; was init_process_group called?' if process_group is None else ''}"
            )
        check_observers("BaguaProcessGroup", observers)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise ValueError(f"BaguaProcessGroup: timeout must be a positive datetime.timedelta, got {timeout!r}")
        if transport is not None and not callable(transport):
            raise TypeError(f"BaguaProcessGroup: transport must be a class of torchbagua.transport, got {transport!r}")
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
        verdict = self._agree({**same, **(must_agree or {})}, refusal)
        self.id = verdict.id
        # Where one rank asks for it all have to take part.
        self.compares_clocks = verdict.compares_clocks
        self._other_clocks = verdict.other_clocks
        self.board = StoreBoard(self._store, self.rank, self.size)
        self.nodes = given_nodes or verdict.nodes
        self.node_ranks: list[list[int]] = [[] for _ in range(max(self.nodes) + 1)]
        for rank, node in enumerate(self.nodes):
            self.node_ranks[node].append(rank)
        self.num_shards = min(len(ranks) for ranks in self.node_ranks)
        self.intra_node = None
        self.inter_node = None
        self._is_open = False
        self._global_ranks: list[int] = list(range(self.size))
        with suppress(KeyError):  # torch knows none of a group that was made by hand
            self._global_ranks = dist.get_process_group_ranks(process_group)
        self.world = self._communicator("world", "world", list(range(self.size)))
        self.overlap = Overlap(self.world)
        self._describe_node_groups()

    def _agree(self, same: Settings, refusal: str | None) -> Verdict:
        """Return what is known of all ranks, which agree in `same` and the package's version."""
        # Every rank constructs its groups in the same order, so counting own constructions gives all the same name.
        counter = f"torchbagua/constructed/{self.rank}"
        self._store = dist.PrefixStore(f"torchbagua/{self._group_store.add(counter, 1)}", self._group_store)
        own = Introduction(
            settings={"the version of torchbagua": __version__, **same},
            host=socket.gethostname(),
            clock=clock_of_machine(),
            compares_clocks=self.tracer.compares_clocks,
            id=secrets.token_hex(8),
            refusal=refusal,
        )
        try:
            return agree_over_store(self._store, self.rank, self.size, own, self.timeout)
        except TimeoutError:
            self._group_store.add(counter, -1)  # a rank that has not come has not counted either: all may try again
            raise

    def open(self) -> None:
        """Open the private groups now, and not when they are first used. Collective.

        Of a group of more than 32 ranks, two connect at their first message. In a smaller one all connect now, so that
        a rank which is gone is noticed at once.

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
                warn_user(  # which may raise: the others, who wait for nobody here, then notice at once
                    f"torchbagua: backend {name} does not bound its waits by timeout={self.timeout}: if a rank is "
                    "gone, the others may wait for it for ever. Have the launcher watch the ranks"
                )
        except BaseException:
            self.close()
            raise

    def _members(self, key: str, ranks: list[int]) -> Members:
        return Members(
            process_group=self.process_group,
            ranks=tuple(ranks),
            rank=ranks.index(self.rank),
            store=dist.PrefixStore(key, self._store),
            timeout=self.timeout,
            global_ranks=tuple(self._global_ranks[rank] for rank in ranks),
        )

    def _communicator(self, scope: str, key: str, ranks: list[int]) -> Communicator:
        members = self._members(key, ranks)
        return Communicator(members, scope, self.tracer, self._choice.open(members))

    def _describe_node_groups(self) -> None:
        """Say who is in the groups in and between nodes, where there are several nodes and one has several ranks."""
        if not 1 < len(self.node_ranks) < self.size:
            return
        node = self.nodes[self.rank]
        shard = self.node_ranks[node].index(self.rank)
        self.intra_node = self._communicator("intra_node", f"node{node}", self.node_ranks[node])
        if shard < self.num_shards:
            owners = [ranks[shard] for ranks in self.node_ranks]
            self.inter_node = self._communicator("inter_node", f"shard{shard}", owners)

    def _wait_until_all_are_open(self) -> None:
        """Wait for the slowest rank: one that closes its groups at once would end what others still connect to it."""
        if self._store.add("open", 1) == self.size:
            self._store.set("all are open", "")
        try:
            self._store.wait(["all are open"], self.timeout)
        except RuntimeError as error:
            raise self.world.failure("opening private groups on all ranks", cause_of(error)) from error

    def open_gradient_group(self) -> "BaguaProcessGroup":
        """Return a group of the ranks of this node, which averages gradients beside this group. Collective.

        It sends over the same kinds of transports as this group, and is closed with it.
        """
        node = self.nodes[self.rank]
        members = self._members(f"gradients of node{node}", self.node_ranks[node])
        transports = self._choice.open_in_stream_order(members)
        self._gradients = Communicator(members, "intra_node", self.tracer, transports)
        if transports:
            (transport,) = transports.values()
            return BaguaProcessGroup(transport.torch_group(), timeout=self.timeout)
        by_hand = dist.ProcessGroup(members.store, members.rank, members.size)
        return BaguaProcessGroup(by_hand, timeout=self.timeout, transport=self._choice.within(members))

    def move_beside_training(self) -> None:
        """Communicate on the lane's thread from now on; the lane calls `poll`."""
        members = self._members("world", list(range(self.size)))
        for device_type, transport in self._choice.open_beside_training(members).items():
            self.world.use_transport(device_type, transport)
        for communicator in self._communicators:
            communicator.watch_launches()

    def compare_clocks(self) -> None:
        """Compare the clocks of the ranks and add to `clock_offsets`, if `compares_clocks`. Collective.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        if self.compares_clocks:
            self.clock_offsets.append(clock_offset(self.world, self._other_clocks))

    def duplicate(
        self,
        *,
        timeout: timedelta | None = None,
        observers: Sequence[Observer] = (),
        must_agree: Settings | None = None,
        refusal: str | None = None,
    ) -> "BaguaProcessGroup":
        """Return a group of the same ranks and nodes, with private groups of its own, which are open. Collective.

        Args:
            timeout: the longest wait for another rank; by default that of this group.
            observers: further observers, beside those of this group.
            must_agree, refusal: as in the constructor.
        """
        group = BaguaProcessGroup(
            self.process_group,
            nodes=self.nodes,
            timeout=timeout or self.timeout,
            observers=[*self._observers, *observers],
            transport=self.transport,
            must_agree=must_agree,
            refusal=refusal,
        )
        group.open()
        return group


def _name_of(transport: TransportMaker | None) -> str | None:
    """Return a name of the kind of transport, for comparison over the ranks."""
    if isinstance(transport, partial):
        named = sorted(transport.keywords.items())
        plain = (f"{name}={value!r}" for name, value in named if isinstance(value, str | int | float | None))
        return f"{_name_of(transport.func)}({', '.join(plain)})"
    return None if transport is None else getattr(transport, "__qualname__", type(transport).__qualname__)
