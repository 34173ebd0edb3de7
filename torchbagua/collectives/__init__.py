"""Collectives over explicit groups: the only place that exchanges tensors between ranks."""

from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.decentralized_mean import (
    PEER_SELECTION_MODES,
    PeerMean,
    check_peers,
    decentralized_mean,
    moved_within,
    shift_one_peer,
)
from torchbagua.collectives.error_feedback import ErrorFeedback, Held
from torchbagua.collectives.errors import CommunicationError, cause_of
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.lockstep import check_in_step, fingerprint, maximum
from torchbagua.collectives.low_precision_ring import LowPrecisionRing, Replicas, low_precision_ring
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.two_phase_mean import Mean, TwoPhaseMean, centralized_mean

__all__ = [
    "PEER_SELECTION_MODES",
    "BaguaProcessGroup",
    "CommunicationError",
    "Communicator",
    "ErrorFeedback",
    "Held",
    "Hierarchical",
    "LowPrecisionRing",
    "Mean",
    "PeerMean",
    "Replicas",
    "TwoPhaseMean",
    "broadcast_state",
    "broadcast_tensors",
    "cause_of",
    "centralized_mean",
    "check_in_step",
    "check_peers",
    "decentralized_mean",
    "fingerprint",
    "low_precision_ring",
    "maximum",
    "moved_within",
    "shift_one_peer",
]
