"""Bagua's `algorithms.q_adam`."""

from torchbagua.algorithms.qadam.algorithm import QAdamAlgorithm, QAdamAlgorithmImpl
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]
