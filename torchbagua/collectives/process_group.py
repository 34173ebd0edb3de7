"""BaguaProcessGroup: a torch process group, the nodes its ranks are on, and private groups for a lane."""

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua._torch import timeout_of
from torchbagua._warnings import warn_user
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.board import StoreBoard
from torchbagua.collectives.clock import clock_of_machine, clock_offset
from torchbagua.collectives.group_operations import GroupOperations
from torchbagua.collectives.nodes import number_given_nodes
from torchbagua.collectives.store_agreement import Introduction, Settings, Verdict, agree_over_store
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import ClockOffset, Observer, check_observers
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, cause_of
from torchbagua.transport.nccl import PrivateNccl, warn_of_launch_order
from torchbagua.transport.private_groups import has_nccl
from torchbagua.transport.streams import wait_on_host
from torchbagua.version import __version__


class BaguaProcessGroup(GroupOperations):
    """The ranks of a torch process group, sorted into nodes, with private groups over all ranks and by node.

    `attach` makes one from the group of the module. Make one yourself to say which rank is on which node. Construction
    is collective: every rank of `process_group` constructs it, in the same order. The private groups use gloo. They are
    opened by `open`, or when an operation of this group first needs them; an attachment opens groups of its own.

    Its methods `all_reduce`, `all_gather`, `reduce_scatter` and `exchange` are for algorithms of yours. All ranks call
    the same ones, in the same order, with tensors of the same sizes. Call them from the operations of a bucket only,
    which run on the lane. They work with tensors on CPUs and GPUs; over NCCL the host does not wait. Observers are told
    of every message. If a rank is gone or does not take part within the timeout, they raise CommunicationError.

    Args:
        process_group: a torch ProcessGroup that has a store: the world, or one from `new_group`, or one that you made.
        nodes: which node each rank is on: a list with a label for each rank. By default nodes are told apart by host
            names. Give it where host names mislead, as in containers and network namespaces.
        timeout: the longest wait for another rank, in construction and after; by default that of `process_group`.
        observers: are told of every phase of communication over the private groups.
        must_agree: further values that must be the same on all ranks, by the name that an error gives them.
        refusal: an UncompressedParametersWarning that a filter makes an error on this rank; all ranks then raise it.

    Attributes:
        process_group: the torch group, over which DDP communicates too.
        timeout: the longest wait for another rank.
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
        has_nccl: whether NCCL moves tensors of GPUs.
        num_shards: the smallest number of ranks on a node. A tensor is split into as many shards between nodes.
        world: the private group over all ranks.
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
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.timeout = timeout or timeout_of(process_group)
        self.has_nccl = has_nccl(process_group)
        self._observers = tuple(observers)
        self.tracer = Tracer(observers)
        self.clock_offsets: list[ClockOffset] = []
        self.fitting_topologies: list[tuple[Topology, bool]] = []
        given_nodes = None if nodes is None else number_given_nodes(nodes, self.size)
        verdict = self._agree({"BaguaProcessGroup's argument nodes": given_nodes, **(must_agree or {})}, refusal)
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
        self._gradient_nccl: PrivateNccl | None = None
        self._global_ranks: list[int] | None = None
        with suppress(KeyError):  # torch knows none of a group that was made by hand
            self._global_ranks = dist.get_process_group_ranks(process_group)
        self.world = self._communicator("world", "world", list(range(self.size)))
        self._describe_node_groups()

    def _agree(self, same: Settings, refusal: str | None) -> Verdict:
        """Return what is known of all ranks, which agree in `same` and the package's version."""
        group_store = self.process_group.get_group_store()
        # Every rank constructs its groups in the same order, so counting own constructions gives all the same name.
        counter = f"torchbagua/constructed/{self.rank}"
        self._store = dist.PrefixStore(f"torchbagua/{group_store.add(counter, 1)}", group_store)
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
            group_store.add(counter, -1)  # a rank that has not come has not counted either: all may try again
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
        except BaseException:
            self.close()
            raise

    def _communicator(self, scope: str, key: str, ranks: list[int]) -> Communicator:
        return Communicator(
            dist.PrefixStore(key, self._store),
            rank=ranks.index(self.rank),
            ranks=ranks,
            scope=scope,
            timeout=self.timeout,
            tracer=self.tracer,
            nccl=self.process_group if self.has_nccl and scope == "world" else None,
            global_ranks=self._global_ranks and [self._global_ranks[rank] for rank in ranks],
        )

    def _describe_node_groups(self) -> None:
        """Say who is in the groups in and between nodes, where there are several nodes and one has several ranks."""
        if not 1 < len(self.node_ranks) < self.size:
            return
        node = self.nodes[self.rank]
        shard = self.node_ranks[node].index(self.rank)
        self.intra_node = self._communicator("intra_node", f"node{node}", self.node_ranks[node])
        self._open_nccl(self.intra_node, f"node{node}")
        if shard < self.num_shards:
            owners = [ranks[shard] for ranks in self.node_ranks]
            self.inter_node = self._communicator("inter_node", f"shard{shard}", owners)
            self._open_nccl(self.inter_node, f"shard{shard}")

    def _wait_until_all_are_open(self) -> None:
        """Wait for the slowest rank: one that closes its groups at once would end what others still connect to it."""
        if self._store.add("open", 1) == self.size:
            self._store.set("all are open", "")
        try:
            self._store.wait(["all are open"], self.timeout)
        except RuntimeError as error:
            raise self.world.failure("opening private groups on all ranks", cause_of(error)) from error

    def open_gradient_group(self) -> dist.ProcessGroup:
        """Return a torch group of the ranks of this node, to make a `BaguaProcessGroup` of, where there are nodes.

        It has NCCL where this group has, and no other backend. It is closed with this group.
        """
        node = self.nodes[self.rank]
        ranks = self.node_ranks[node]
        place = (dist.PrefixStore(f"gradients of node{node}", self._store), ranks.index(self.rank), len(ranks))
        if not self.has_nccl:
            return dist.ProcessGroup(*place)
        self._gradient_nccl = PrivateNccl(*place, self.timeout)
        return self._gradient_nccl.group

    def open_private_nccl(self) -> None:
        """If there is NCCL, open a private NCCL group of all ranks, for the thread of a lane.

        The training thread launches gradients on `process_group`. What another thread launched there would come between
        them, in another place on each rank. From now on the thread of the lane calls `poll_nccl`.
        """
        if self.has_nccl:
            warn_of_launch_order()
            self._open_nccl(self.world, "world")
            for _, nccl in self._private_nccl:
                nccl.is_polled = True

    def _open_nccl(self, communicator: Communicator, key: str) -> None:
        if self.has_nccl:
            store = dist.PrefixStore(f"{key}/nccl", self._store)
            communicator.set_private_nccl(PrivateNccl(store, communicator.rank, communicator.size, self.timeout))

    def connect_nccl(self, device: torch.device) -> None:
        """Connect the private NCCL groups on this GPU, if they are not connected yet. Collective.

        Raises:
            CommunicationError: a rank did not come within the group's timeout, or NCCL refuses.
        """
        for communicator, nccl in self._private_nccl:
            try:
                nccl.connect(device)
            except (RuntimeError, TimeoutError) as error:
                self.close()
                raise communicator.failure("connecting NCCL", cause_of(error)) from error

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
            must_agree=must_agree,
            refusal=refusal,
        )
        group.open()
        return group

    def tell_through(self, tracer: Tracer, whose: str) -> None:
        """Have the observers of another group told of what is done over this one, and errors say `whose` it is."""
        self.tracer = tracer
        for communicator in self._communicators:
            communicator.tracer = tracer
            communicator.scope = f"{communicator.scope} of {whose}"

    def poll_nccl(self) -> bool:
        """Return whether NCCL is still working on what was launched over the private groups.

        Raises:
            CommunicationError: it has worked on something for longer than the timeout, or the GPU has failed.
        """
        is_under_way = False
        for communicator, nccl in self._private_nccl:
            try:
                launch = nccl.under_way()
            except RuntimeError as error:
                raise communicator.failure("an operation of NCCL", cause_of(error)) from error
            if launch is None:
                continue
            is_under_way = True
            timeout_s = self.timeout.total_seconds()
            if time.monotonic() > launch.at_s + timeout_s:
                cause = f"NCCL was not done after {timeout_s:g} s: a rank is gone, or stands still"
                raise communicator.failure(launch.purpose, cause)
        return is_under_way

    def wait_for_gpu(self, device: torch.device, purpose: str) -> None:
        """Have the host wait until the current stream of a GPU is done. Does nothing on the CPU.

        Raises:
            CommunicationError: it is not done within the timeout; names what NCCL is working on, or else `purpose`.
        """
        if device.type != "cuda":
            return
        try:
            wait_on_host(torch.cuda.current_stream(device).record_event(), self.timeout.total_seconds())
        except TimeoutError as error:
            self.poll_nccl()
            raise self.world.failure(purpose, cause_of(error)) from error
        self.poll_nccl()  # which forgets what is done

    def shut_down_nccl(self) -> None:
        """Let private NCCL groups finish what is under way, and close them. Collective.

        If not all ranks call it, `close` breaks them off: NCCL would wait for a rank that is gone.
        """
        if not self._private_nccl:
            return
        with suppress(CommunicationError):
            all_reduce_max(self.world, [0], "closing the NCCL groups")  # a barrier that raises where a rank is gone
            try:
                for _, nccl in self._private_nccl:
                    nccl.shut_down()
            except (RuntimeError, TimeoutError) as error:
                warn_user(f"torchbagua: {cause_of(error)}; NCCL's groups are broken off")

    def close(self) -> None:
        """Close the private groups, whatever is under way. What NCCL is working on is broken off."""
        for communicator in self._communicators:
            communicator.close()
        if self._gradient_nccl is not None:
            self._gradient_nccl.abort()
        for _, nccl in self._private_nccl:  # when all are broken off, since one may wait for another
            nccl.join()

    @property
    def _private_nccl(self) -> list[tuple[Communicator, PrivateNccl]]:
        every = [(communicator, communicator.private_nccl) for communicator in self._communicators]
        every.append((self.intra_node or self.world, self._gradient_nccl))
        return [(communicator, nccl) for communicator, nccl in every if nccl is not None]

    @property
    def _communicators(self) -> list[Communicator]:
        every = (self.world, self.intra_node, self.inter_node)
        return [communicator for communicator in every if communicator is not None]
