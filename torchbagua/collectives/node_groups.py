"""The communicators of ranks that are on nodes: what collectives need to know of a group."""

from torchbagua.collectives.communicator import Communicator


class NodeGroups:
    """Communicators over all ranks, within nodes and between them.

    Attributes:
        rank, size: own place among all ranks.
        has_nccl: whether NCCL moves tensors of GPUs: over the user's group itself, and over private groups in and
            between nodes.
        num_shards: the smallest number of ranks on a node: so many shards of a tensor can be owned on every node.
        world: over all ranks.
        intra_node: over the ranks of own node; None where there is one node, or one rank a node.
        inter_node: over the ranks that own the same shard on all nodes; None likewise, and on ranks that own no shard.
    """

    rank: int
    size: int
    has_nccl: bool
    num_shards: int
    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None
