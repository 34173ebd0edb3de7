"""Ranks on nodes: how nodes are numbered, and the communicators that collectives need to know of."""

from collections.abc import Sequence

import torch

from torchbagua.collectives.overlapping import Overlap
from torchbagua.transport.communicator import Communicator


class NodeGroups:
    """Communicators over all ranks, within nodes and between them: what collectives need of a `BaguaProcessGroup`.

    Apart from it, since that has operations which are made of collectives.

    Attributes:
        rank, size: own place among all ranks.
        num_shards: the smallest number of ranks on a node: so many shards of a tensor can be owned on every node.
        world: over all ranks.
        intra_node: over the ranks of own node; None where there is one node, or one rank a node.
        inter_node: over the ranks that own the same shard on all nodes; None likewise, and on ranks that own no shard.
        overlap: what means over all ranks share that begin beside each other.
        device: for which they were last prepared.
    """

    rank: int
    size: int
    num_shards: int
    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None
    overlap: Overlap
    device: torch.device = torch.device("cpu")


def number_given_nodes(nodes: Sequence[str | int], num_ranks: int) -> list[int]:
    """Return the numbers of the nodes that a user has named, one for each rank.

    Raises:
        TypeError, ValueError: `nodes` is no such list.
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
    """Return the number of each label, in the order in which they first appear."""
    numbers: dict[str | int, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]
