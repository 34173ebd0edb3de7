"""The mean over a topology: the mean of a rank and its neighbors, in full precision.

Shape suffixes: N elements, L elements of a shard.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from torchbagua.codecs.base import Identity, TensorSpec, divide, sum_dtype
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import Topology, peers_in_order
from torchbagua.observe.events import Details
from torchbagua.transport.communicator import Communicator

# With a longer period, a rank meets so many others that connections to all ranks need no more sockets, and fewer
# threads.
_MAX_CONNECTED_ROUNDS = 16

NeighbourhoodMean = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes the mean of a flat tensor over a rank and its neighbors to another tensor, given the round's index, from 0."""


def check_topology(owner: str, topology: Topology, group: BaguaProcessGroup, *, hierarchical: bool) -> None:
    """Raise ValueError, with `owner` as its subject, if `topology` does not fit the ranks, or nodes, of `group`."""
    # All buckets of an algorithm check the same topology.
    if any(known is topology and of_nodes == hierarchical for known, of_nodes in group.fitting_topologies):
        return
    if hierarchical and group.intra_node is not None:
        topology.check(owner, len(group.node_ranks), "nodes")
    elif group.size > 1:
        topology.check(owner, group.size)
    group.fitting_topologies.append((topology, hierarchical))


def neighbourhood_mean(
    group: BaguaProcessGroup,
    topology: Topology,
    spec: TensorSpec,
    *,
    hierarchical: bool,
) -> NeighbourhoodMean:
    """Return the function that averages a flat tensor over a topology, in full precision."""
    if hierarchical and group.intra_node is not None:
        return _MeanWithPeerNodes(group, topology, spec, float(group.intra_node.size))
    return _MeanWithPeers(group.world, topology, spec.name)


class _MeanWithPeerNodes:
    """The mean of each node, averaged with the peers of the round among nodes."""

    def __init__(self, group: BaguaProcessGroup, topology: Topology, spec: TensorSpec, node_size: float) -> None:
        self._hierarchical = Hierarchical(group, spec, Identity().block_elements)
        self._node_size = node_size
        owners = self._hierarchical.owners
        self._mean = None if owners is None else _MeanWithPeers(owners, topology, spec.name)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor, round_index: int) -> None:
        with self._hierarchical.sum_of_shard(x_N, out_N) as sum_L:
            if self._mean is not None:
                divide(sum_L, self._node_size, sum_L)
                self._mean(sum_L, sum_L, round_index)


class _MeanWithPeers:
    """Mean with the peers of the round, summed in rank order, in float32 or float64: bitwise equal on all its ranks.

    Equal weights are a division by their number, as in every other mean.
    """

    def __init__(self, communicator: Communicator, topology: Topology, bucket: str) -> None:
        self._communicator = communicator
        self._topology = topology
        self._bucket = bucket
        self._peers: dict[int, tuple[list[int], Mapping[int, float]]] = {}  # by round in the period, with weights

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor, round_index: int) -> None:
        """Write the mean of `x_N` with the peers to `out_N`, a tensor like it or the same tensor."""
        communicator, rank, size = self._communicator, self._communicator.rank, self._communicator.size
        round = round_index % self._topology.period(size)
        if round not in self._peers:
            weights = self._topology.neighbours(rank, size, round)
            self._peers[round] = peers_in_order(self._topology, rank, size, round), weights
        peers, weights = self._peers[round]
        pipeline = Pipeline(communicator, x_N.device)
        if self._topology.period(size) > _MAX_CONNECTED_ROUNDS and pipeline.posts_messages:
            communicator.connect(None, f"peer_exchange of {self._bucket}", x_N.device)
        rows = communicator.scratch("rows", len(peers) * x_N.nbytes, x_N.device)
        values = dict(zip(peers, rows.view(x_N.dtype).view(len(peers), x_N.numel()), strict=True))
        turns = [(peer, peer) for peer in peers]
        Exchange(pipeline, "peer_exchange", values, self._bucket, turns).run([x_N] * len(peers))
        terms = [(x_N if member == rank else values[member], weight) for member, weight in sorted(weights.items())]
        named_peers = (communicator.ranks[peers[0]],) if len(peers) == 1 else ()
        details = Details("peer_exchange", self._bucket, peers=named_peers, num_elements=x_N.numel())
        with communicator.span("reduce", details):
            _write_mean(terms, out_N)


def _write_mean(terms: Sequence[tuple[torch.Tensor, float]], out_N: torch.Tensor) -> None:
    """Write the weighted sum of tensors, in this order, to `out_N`, which may be one of them."""
    (first_N, first_weight), *rest = terms
    dtype = sum_dtype(first_N.dtype)
    if any(weight != first_weight for _, weight in rest):
        total_N = first_N.to(dtype) * first_weight
        for term_N, weight in rest:
            total_N.add_(term_N.to(dtype).mul(weight))
        out_N.copy_(total_N)
        return
    if len(terms) == 2 and out_N.dtype == dtype:  # needs no further memory
        total_N = torch.add(first_N, rest[0][0], out=out_N)
    else:
        total_N = first_N.to(dtype, copy=True)
        for term_N, _ in rest:
            total_N.add_(term_N)
    divide(total_N, float(len(terms)), out_N)
