"""Means, exchanges and agreements among the ranks of a group, coded or not.

May import transport, codecs and what is below them. With transport the only callers of torch.distributed's collectives.
Begin with process_group.py, then centralized_mean.py and two_phase_mean.py.
"""

from torchbagua.collectives.agreement import (
    all_reduce_max,
    find_difference,
    fingerprint,
    fingerprint_of_values,
    require_same_progress,
)
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.collectives.centralized_mean import Mean, centralized_mean, mean_of_nodes
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.gloo_reduce_scatter import gloo_reduce_scatter
from torchbagua.collectives.low_precision_ring import Replicas, check_ring_compression, low_precision_ring
from torchbagua.collectives.low_rank_mean import LowRankMean, product_table
from torchbagua.collectives.low_rank_state import LowRankState, MatrixShape, matrix_shape
from torchbagua.collectives.neighbourhood_mean import check_topology, neighbourhood_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter
from torchbagua.collectives.residuals import Momentum
from torchbagua.collectives.row_gather import RowGather
from torchbagua.collectives.row_mean import RowMean
from torchbagua.collectives.two_phase_mean import TwoPhaseMean
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, cause_of

__all__ = [
    "AllGather",
    "BaguaProcessGroup",
    "CommunicationError",
    "Communicator",
    "ExactGather",
    "LowRankMean",
    "LowRankState",
    "MatrixShape",
    "Mean",
    "Momentum",
    "RankChunks",
    "ReduceScatter",
    "Replicas",
    "RowGather",
    "RowMean",
    "TwoPhaseMean",
    "TwoPhaseResiduals",
    "all_reduce_max",
    "broadcast_state",
    "broadcast_tensors",
    "cause_of",
    "centralized_mean",
    "check_ring_compression",
    "check_topology",
    "clamp_to_mean",
    "find_difference",
    "fingerprint",
    "fingerprint_of_values",
    "gloo_reduce_scatter",
    "low_precision_ring",
    "matrix_shape",
    "mean_of_nodes",
    "neighbourhood_mean",
    "product_table",
    "require_same_progress",
]
