"""Nodes: how they are numbered, and the communicators within and between them."""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchbagua.collectives.exchange import Overlap
from torchbagua.transport.communicator import Communicator


class NodeGroups(Protocol):
    """The part of `BaguaProcessGroup` that collectives use: communicators over all ranks, within and between nodes.

    Attributes:
        rank, size: the number of this rank, and the number of ranks.
        num_shards: the smallest number of ranks on a node, and so the number of shards that every node can own.
        world: the communicator over all ranks.
        intra_node: the communicator over the ranks of this node; None with one node, or with one rank on each node.
        inter_node: the communicator over the ranks that own the same shard, one on each node; None likewise, and on
            ranks that own no shard.
        overlap: the state that overlapping means over all ranks share.
    """

    rank: int
    size: int
    num_shards: int
    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None
    overlap: Overlap

    @property
    def device(self) -> torch.device:
        """The device for which the communicators were last prepared."""
        ...


def number_given_nodes(nodes: Sequence[str | int], num_ranks: int) -> list[int]:
    """Return the numbers of the nodes that a user has labeled, one for each rank.

    Raises:
        TypeError, ValueError: `nodes` is not a list with a label for each rank.
    """
    is_list = isinstance(nodes, list | tuple)
    if not is_list or not all(isinstance(label, str | int) for label in nodes):
        raise TypeError(f"BaguaProcessGroup: nodes must be a list of strings or integers, got {nodes!r}")
    if len(nodes) != num_ranks:
        raise ValueError(
            f"BaguaProcessGroup: nodes must have one entry for each of {num_ranks} ranks, got {len(nodes)}"
        )
    return number_by_first_appearance(nodes)


def number_by_first_appearance(labels: Sequence[str | int]) -> list[int]:
    """Return the number of each label, in the order of first appearance."""
    numbers: dict[str | int, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]
