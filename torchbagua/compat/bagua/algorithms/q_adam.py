"""Bagua's `algorithms.q_adam`."""

from torchbagua.algorithms import QAdamAlgorithm, QAdamAlgorithmImpl, QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]
