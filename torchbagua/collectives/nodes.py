"""The communicators within and between nodes, as collectives use them."""

from typing import Protocol

import torch

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
    """

    rank: int
    size: int
    num_shards: int
    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None

    @property
    def device(self) -> torch.device:
        """The device for which the communicators were last prepared."""
        ...
