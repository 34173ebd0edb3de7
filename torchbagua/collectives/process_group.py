"""BaguaProcessGroup: a torch process group, the nodes its ranks are on, and private groups for a lane."""

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua.collectives.agreement import Settings, all_reduce_max, check_same_settings, gather_settings
from torchbagua.collectives.board import StoreBoard
from torchbagua.collectives.clock import clock_of_machine, clock_offset
from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.errors import CommunicationError, cause_of
from torchbagua.collectives.group_operations import GroupOperations
from torchbagua.collectives.nodes import number_by_first_appearance, number_given_nodes
from torchbagua.collectives.private_groups import has_nccl
from torchbagua.collectives.private_nccl import PrivateNccl, warn_of_launch_order
from torchbagua.events import ClockOffset, Observer, check_observers
from torchbagua.side_stream import wait_on_host
from torchbagua.topology import Topology
from torchbagua.torch_private import timeout_of
from torchbagua.tracer import Tracer
from torchbagua.user_warning import warn_user
from torchbagua.version import __version__


class BaguaProcessGroup(GroupOperations):
    """The ranks of a torch process group, sorted into nodes, with private gloo groups over all, in and between nodes.

    Construction is collective: every rank of `process_group` constructs it, in the same order.

    Args:
        process_group: any torch ProcessGroup that has a store: the world, one from `new_group`, a hand-made one.
        nodes: which node each rank is on, a list with one label a rank; default: the ranks' host names, exchanged over
            the store. Give it where host names mislead: containers and network namespaces share or invent them.
        timeout: bound on every wait, in construction and after; default: that of `process_group`.
        observers: hear of every phase of communication over the private groups.
        must_agree: further values that all ranks must have in common, by what an error calls them.

    Attributes:
        process_group: the torch group that it was made of, on which DDP communicates too.
        timeout: the bound on every wait.
        id: the same on all ranks, and that of no other group.
        rank: own number in `process_group`, as in torch.
        size: the number of ranks.
        nodes: node index of each rank, numbered in order of first appearance.
        node_ranks: for each node, its ranks in ascending order.
        tracer: tells the observers, for whatever runs over the private groups.
        board: where ranks pin up texts for each other.
        compares_clocks: whether an observer of any rank needs to know how far the ranks' clocks are apart.
        clock_offsets: one whenever ranks have compared them.
        fitting_topologies: those found to fit the ranks, or the nodes: see `check_topology`.
        has_nccl: whether NCCL moves tensors of GPUs.
        num_shards: the smallest number of ranks on a node: so many shards of a tensor can be owned on every node.
        world: over all ranks.
        intra_node: over the ranks of own node; None where there is one node, or one rank a node.
        inter_node: over the ranks that own the same shard on all nodes; None likewise, and on ranks that own no shard.

    Raises:
        TypeError, ValueError: unusable arguments; ranks that disagree in `nodes`, the package's version or
            `must_agree`.
        TimeoutError: ranks that did not construct it in time.
        CommunicationError: a private group could not be opened.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        nodes: Sequence[str | int] | None = None,
        timeout: timedelta | None = None,
        observers: Sequence[Observer] = (),
        must_agree: Settings | None = None,
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
        every = self._gather_settings({**(must_agree or {}), "nodes": given_nodes}, must_agree or {})
        self.id = str(every[0]["id"])
        # Where one rank asks for it all have to take part.
        self.compares_clocks = any(settings["compares clocks"] for settings in every)
        clocks = [settings["clock"] for settings in every]
        self._other_clocks = [rank for rank in range(1, self.size) if clocks[rank] is None or clocks[rank] != clocks[0]]
        self.board = StoreBoard(self._store, self.rank, self.size)
        self.nodes = given_nodes or number_by_first_appearance([str(settings["host"]) for settings in every])
        self.node_ranks = [
            [rank for rank, on in enumerate(self.nodes) if on == node] for node in range(max(self.nodes) + 1)
        ]
        self.num_shards = min(len(ranks) for ranks in self.node_ranks)
        self.intra_node = None
        self.inter_node = None
        self.world = self._communicator("world", "world", list(range(self.size)))
        try:
            self._open_node_groups()
            self._wait_until_all_are_open()
        except BaseException:
            self.close()
            raise

    def _gather_settings(self, own: Settings, same: Settings) -> list[Settings]:
        """Return the settings of all ranks, which agree in `nodes`, the package's version and those of `same`."""
        group_store = self.process_group.get_group_store()
        # Every rank constructs its groups in the same order, so counting own constructions gives all the same name.
        counter = f"torchbagua/constructed/{self.rank}"
        self._store = dist.PrefixStore(f"torchbagua/{group_store.add(counter, 1)}", group_store)
        settings: Settings = {
            **own,
            "version": __version__,
            "host": socket.gethostname(),
            "compares clocks": self.tracer.compares_clocks,
            "clock": clock_of_machine(),
            "id": secrets.token_hex(8),
        }
        try:
            every = gather_settings(self._store, self.rank, self.size, settings, self.timeout)
        except TimeoutError:
            group_store.add(counter, -1)  # a rank that has not come has not counted either: all may try again
            raise
        titles = {"version": "the version of torchbagua", "nodes": "BaguaProcessGroup's argument nodes"}
        check_same_settings(every, {**titles, **{name: name for name in same}})
        return every

    def _communicator(self, scope: str, key: str, ranks: list[int]) -> Communicator:
        return Communicator(
            dist.PrefixStore(key, self._store),
            rank=ranks.index(self.rank),
            ranks=ranks,
            scope=scope,
            timeout=self.timeout,
            tracer=self.tracer,
            nccl=self.process_group if self.has_nccl and scope == "world" else None,
        )

    def _open_node_groups(self) -> None:
        """Open the groups in and between nodes, where there are several nodes and one has several ranks."""
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

    def open_private_nccl(self) -> None:
        """Have NCCL, where it is there, move tensors over a private group of all ranks, for a lane's own thread.

        The training thread launches gradients on the user's group, `process_group`. What another thread launches there
        would lie between them, in another place on each rank. From now on the lane's thread calls `poll_nccl`.
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
        """Connect the private NCCL groups on this GPU, where they are not connected. Collective.

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
        """Add to `clock_offsets`, where `compares_clocks`. Collective.

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
    ) -> "BaguaProcessGroup":
        """Return the same ranks, nodes and observers, and further ones, with new private groups. Collective."""
        return BaguaProcessGroup(
            self.process_group,
            nodes=self.nodes,
            timeout=timeout or self.timeout,
            observers=[*self._observers, *observers],
            must_agree=must_agree,
        )

    def poll_nccl(self) -> bool:
        """Return whether NCCL is not done with what was launched over private groups.

        Raises:
            CommunicationError: it has been at something longer than the group's timeout, or the GPU has failed.
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
        """Wait, on the host, until the current stream of a GPU has done what it was told; on the CPU there is none.

        Raises:
            CommunicationError: it has not within the group's timeout; names what NCCL is at, or else `purpose`.
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
        """Let private NCCL groups finish what is under way, and close them, if all ranks do so; collective.

        Else it is left to `close` to break them off: NCCL would wait for a rank that is gone.
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
        """Close the private groups, whatever is under way; what NCCL is at is broken off."""
        for communicator in self._communicators:
            communicator.close()
        for _, nccl in self._private_nccl:  # when all are broken off, since one may wait for another
            nccl.join()

    @property
    def _private_nccl(self) -> list[tuple[Communicator, PrivateNccl]]:
        every = [(communicator, communicator.private_nccl) for communicator in self._communicators]
        return [(communicator, nccl) for communicator, nccl in every if nccl is not None]

    @property
    def _communicators(self) -> list[Communicator]:
        every = (self.world, self.intra_node, self.inter_node)
        return [communicator for communicator in every if communicator is not None]
