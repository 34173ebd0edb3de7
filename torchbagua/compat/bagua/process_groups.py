"""Bagua's process groups and communicators: wrappers of torch's groups, which communicate."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import torchbagua as tb
from torchbagua.compat.bagua import env
from torchbagua.compat.bagua._torch import nccl_group


class BaguaCommunicator:
    """The ranks that take part in a primitive of `torchbagua.compat.bagua`.

    Attributes:
        group: torch's group of these ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def rank(self) -> int:
        """Return this rank's number in the communicator."""
        return self.group.rank()

    def nranks(self) -> int:
        """Return the number of ranks."""
        return self.group.size()


class CommMember:
    """Placeholders for a communicator: the world, and a communicator that does not include this rank."""

    WORLD = object()
    NON_COMM_MEMBER = object()


class ProcessGroupFacade:
    """Bagua's BaguaProcessGroup: the ranks that train together. `new_group` and `from_torch_group` create it.

    It wraps a torch group; `open` returns the `torchbagua.BaguaProcessGroup` of these ranks.

    Attributes:
        torch_group: torch's group of these ranks; None on a rank that is not a member.
        ranks: their ranks in the world, in ascending order.
        stream: the `stream` argument; no effect.
    """

    def __init__(
        self, torch_group: dist.ProcessGroup | None, ranks: Sequence[int], stream: torch.cuda.Stream | None = None
    ) -> None:
        self.torch_group = torch_group
        self.ranks = list(ranks)
        self.stream = stream
        self._by_scope: dict[str, object] = {}

    def __repr__(self) -> str:
        """Return the name of Bagua's class, with the ranks."""
        return f"BaguaProcessGroup(ranks={self.ranks})"

    def get_global_communicator(self) -> object:
        """Return the `BaguaCommunicator` of all ranks; `CommMember.NON_COMM_MEMBER` if this rank is not a member."""
        return CommMember.NON_COMM_MEMBER if self.torch_group is None else BaguaCommunicator(self.torch_group)

    def get_intra_node_communicator(self) -> object:
        """Return the `BaguaCommunicator` of the ranks on this node. The first call is collective; keep the group."""
        return self._communicator_of_nodes("intra")

    def get_inter_node_communicator(self) -> object:
        """Return the communicator of the first ranks of all nodes; `CommMember.NON_COMM_MEMBER` on other ranks.

        The first call is collective; keep the group.
        """
        return self._communicator_of_nodes("inter")

    def open(self) -> tb.BaguaProcessGroup:
        """Return torchbagua's group, which knows the nodes. Collective; the caller must close it."""
        return tb.BaguaProcessGroup(self.require_torch_group())

    def require_torch_group(self) -> dist.ProcessGroup:
        """Return `torch_group`. Raises ValueError if this rank is not a member."""
        if self.torch_group is None:
            raise ValueError(f"torchbagua.compat.bagua: this rank must be in the process group, got ranks {self.ranks}")
        return self.torch_group

    def _communicator_of_nodes(self, scope: str) -> object:
        if self.torch_group is None:
            return CommMember.NON_COMM_MEMBER
        if not self._by_scope:
            opened = self.open()
            opened.close()
            own = opened.node_ranks[opened.nodes[opened.rank]]
            leaders = [ranks[0] for ranks in opened.node_ranks]
            self._by_scope["intra"] = self._sub_group(f"{opened.id}/node{opened.nodes[opened.rank]}", own, opened)
            self._by_scope["inter"] = self._sub_group(f"{opened.id}/leaders", leaders, opened)
        return self._by_scope[scope]

    def _sub_group(self, key: str, ranks: list[int], opened: tb.BaguaProcessGroup) -> object:
        assert self.torch_group is not None
        if opened.rank not in ranks:
            return CommMember.NON_COMM_MEMBER
        store = dist.PrefixStore(key, self.torch_group.get_group_store())
        place = (store, ranks.index(opened.rank), len(ranks))
        if opened.world.in_stream_order(torch.device("cuda")):
            return BaguaCommunicator(nccl_group(*place, opened.timeout))
        members = tb.BaguaProcessGroup(dist.ProcessGroup(*place), timeout=opened.timeout)
        return BaguaCommunicator(members.world.torch_group)


BaguaProcessGroup = ProcessGroupFacade


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return dist.is_initialized()


def init_process_group(
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    backend: str | None = None,
) -> None:
    """Create torch's default process group, if it does not exist yet. Collective.

    Call it before everything else in `torchbagua.compat.bagua`, except `get_rank` and the other functions of `env`.
    With GPUs, call `torch.cuda.set_device(get_local_rank())` first.

    Args:
        store: the store for the rendezvous. By default the store that the environment names, as torchrun sets it.
        rank: this rank; only with `store`.
        world_size: the number of ranks; only with `store`.
        local_world_size: the number of ranks on each node; only with `store`. As in Bagua, RANK, WORLD_SIZE, LOCAL_RANK
            and LOCAL_WORLD_SIZE are then set in the environment.
        backend: the name of a torch backend. By default gloo, and NCCL for GPU tensors if there are GPUs.

    Raises:
        ValueError: `store` is given, but one of the numbers is missing or invalid.
    """
    if store is not None:
        if not 0 <= rank < world_size or local_world_size < 1:
            raise ValueError(
                "init_process_group: with a store, rank, world_size and local_world_size must be given, got "
                f"{rank}, {world_size} and {local_world_size}"
            )
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["LOCAL_RANK"] = str(rank % local_world_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    if dist.is_initialized():
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    timeout = timedelta(minutes=30)  # Bagua's
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def new_group(ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None) -> ProcessGroupFacade:
    """Return a process group. Collective: every rank of the world must call it, also ranks that are not members.

    Args:
        ranks: the members; by default all ranks.
        stream: no effect, since torch's NCCL has private streams; accepted because Bagua's function has it.

    Raises:
        RuntimeError: the default process group does not exist.
        ValueError: a rank does not exist.
    """
    world = _get_default_group()
    members = sorted(world.ranks if ranks is None else ranks)
    if unknown := [rank for rank in members if rank not in world.ranks]:
        raise ValueError(f"new_group: ranks must be below {len(world.ranks)}, got {unknown}")
    group = dist.new_group(members)
    return ProcessGroupFacade(group if env.get_rank() in members else None, members, stream)


def from_torch_group(group: dist.ProcessGroup, stream: torch.cuda.Stream | None = None) -> ProcessGroupFacade:
    """Return Bagua's process group with the ranks of a torch group."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:  # a directly constructed group does not know its global ranks
        ranks = list(range(group.size()))
    return ProcessGroupFacade(group, ranks, stream)


def to_bagua_process_group(
    process_group: dist.ProcessGroup | ProcessGroupFacade | None = None,
) -> ProcessGroupFacade:
    """Return Bagua's process group for a process group of Bagua or torch, or for the world (None)."""
    if process_group is None:
        return _get_default_group()
    if isinstance(process_group, ProcessGroupFacade):
        return process_group
    if isinstance(process_group, dist.ProcessGroup):
        return from_torch_group(process_group)
    raise TypeError(
        "torchbagua.compat.bagua: process_group must be a group from new_group, a torch.distributed.ProcessGroup or "
        f"None, got {process_group!r}"
    )


def _get_default_group() -> ProcessGroupFacade:
    """Return the world. Bagua's examples call this name."""
    if not dist.is_initialized():
        raise RuntimeError("torchbagua.compat.bagua: no default process group exists; call init_process_group first")
    assert dist.group.WORLD is not None
    return from_torch_group(dist.group.WORLD)


class BaguaBackend:
    """The object that `get_backend` returns; Bagua's example of its primitives reads its communicator.

    Attributes:
        model_name: the argument of `get_backend`.
        global_communicator: the communicator of all ranks.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.global_communicator = _get_default_group().get_global_communicator()


def get_backend(model_name: str) -> BaguaBackend:
    """Return an object with the name, and the communicator of all ranks."""
    return BaguaBackend(model_name)
