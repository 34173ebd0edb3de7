"""Means of weights in decentralized training: over all ranks, or with one peer at a time.

Shape suffixes: N elements, L elements of a shard.
"""

from collections.abc import Callable

import torch

from torchbagua.collectives.centralized_mean import centralized_mean
from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.exchange import Exchange
from torchbagua.collectives.hierarchical import BetweenNodes, Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.compressors import Identity, TensorSpec, sum_dtype
from torchbagua.events import Details

PEER_SELECTION_MODES = ("all", "shift_one")

PeerMean = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes the mean of a flat tensor with this rank's peers to another one, given the number of such means before."""


def check_peers(owner: str, group: BaguaProcessGroup, hierarchical: bool, peer_selection_mode: str) -> None:
    """Raise ValueError where `peer_selection_mode` is none or does not fit `group`; `owner` is what the error names."""
    if peer_selection_mode not in PEER_SELECTION_MODES:
        raise ValueError(
            f"{owner}: peer_selection_mode must be one of {PEER_SELECTION_MODES}, got {peer_selection_mode!r}"
        )
    between_nodes = hierarchical and group.intra_node is not None
    number, what = (len(group.node_ranks), "nodes") if between_nodes else (group.size, "ranks")
    if peer_selection_mode == "shift_one" and number > 1 and number % 2:
        raise ValueError(
            f"{owner}: peer_selection_mode='shift_one' pairs {what} and needs an even number, got {number}"
        )


def decentralized_mean(
    group: BaguaProcessGroup,
    spec: TensorSpec,
    *,
    hierarchical: bool,
    peer_selection_mode: str,
) -> PeerMean:
    """Return the function that averages a flat tensor with this rank's peers, in full precision.

    Args:
        group: whose ranks take part.
        spec: the tensor.
        hierarchical: where there are several nodes with several ranks: form the mean of each node, average it with the
            peers of the node, and give the result to all ranks of the node. With "all" that is the mean of all ranks,
            also where nodes are of unequal size.
        peer_selection_mode: "all", or "shift_one" for another peer each time (see `shift_one_peer`).

    Returns:
        A function of the tensor, another one like it for the mean, and the number of means before.

    Raises:
        ValueError: no mode has that name, or the ranks or nodes cannot be paired.
    """
    check_peers("decentralized_mean", group, hierarchical, peer_selection_mode)
    if peer_selection_mode == "all" or group.size == 1:
        mean = centralized_mean(group, Identity(), spec, hierarchical=hierarchical)
        return lambda x_N, out_N, num_before: mean(x_N, out_N)
    if hierarchical and group.intra_node is not None:
        node_size = torch.full((1,), float(group.intra_node.size), device=spec.device)

        def make_inner(owners: Communicator, shard: slice, shard_spec: TensorSpec) -> BetweenNodes:
            pair_mean = PairMean(owners, spec.name)
            return lambda sum_L, num_before: pair_mean(sum_L.div_(node_size), sum_L, num_before)

        over_nodes = Hierarchical(group, spec, Identity().block_elements, make_inner)

        def mean_of_nodes(x_N: torch.Tensor, out_N: torch.Tensor, num_before: int) -> None:
            over_nodes(out_N.copy_(x_N), num_before)

        return mean_of_nodes
    return PairMean(group.world, spec.name)


def shift_one_peer(rank: int, size: int, num_before: int) -> int:
    """Return the peer of `rank` among `size` ranks, an even number, after `num_before` rounds.

    Ranks of the lower half meet ranks of the upper half; the pairing is mutual, and every such pair meets once in
    size / 2 rounds. Source: Bagua (arXiv 2107.01499), DecentralizedAlgorithm.
    """
    half = size // 2
    if rank < half:
        return (num_before + rank) % half + half
    return (rank - half - num_before) % half


def clamp_to_mean(x_N: torch.Tensor, difference_N: torch.Tensor, mean_N: torch.Tensor) -> torch.Tensor:
    """Return `x_N` + `difference_N`, each element kept between its own value and the mean.

    For running statistics, which decay: the difference between a mean and an older value can be more than what is left
    of that value, and a variance would become negative. Of complex numbers both parts, each by itself.
    """
    if x_N.is_complex():
        parts = [(tensor.real, tensor.imag) for tensor in (x_N, difference_N, mean_N)]
        return torch.complex(*(clamp_to_mean(*same) for same in zip(*parts, strict=True)))
    return torch.clamp(x_N + difference_N, torch.minimum(x_N, mean_N), torch.maximum(x_N, mean_N))


class PairMean:
    """Mean with one peer, in full precision: (mine + theirs) / 2, the same bits on both."""

    def __init__(self, communicator: Communicator, bucket: str) -> None:
        self._communicator = communicator
        self._bucket = bucket

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor, num_before: int) -> None:
        """Write the mean of `x_N` with the peer to `out_N`, like it or the same.

        Raises:
            CommunicationError: the peer is gone or did not take part within the group's timeout.
        """
        communicator = self._communicator
        peer = shift_one_peer(communicator.rank, communicator.size, num_before)
        theirs_N = communicator.scratch("rows", x_N.nbytes, x_N.device).view(x_N.dtype)
        Exchange(communicator, "peer_exchange", {peer: theirs_N}, self._bucket, [(peer, peer)]).run(lambda _: x_N)
        whose = (communicator.ranks[peer],)
        details = Details("peer_exchange", self._bucket, peers=whose, num_elements=x_N.numel())
        with communicator.span("reduce", details):
            if x_N.dtype == sum_dtype(x_N.dtype):
                torch.add(x_N, theirs_N, out=out_N).div_(2)
            else:
                out_N.copy_(x_N.float().add_(theirs_N).div_(2))
