"""Collectives over explicit groups: the only place that exchanges tensors between ranks."""

from torchbagua.collectives.communicator import CommunicationError, Communicator
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.two_phase_mean import HierarchicalMean, Mean, TwoPhaseMean, centralized_mean

__all__ = [
    "BaguaProcessGroup",
    "CommunicationError",
    "Communicator",
    "HierarchicalMean",
    "Mean",
    "TwoPhaseMean",
    "centralized_mean",
]
