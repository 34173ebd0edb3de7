"""Bagua's `algorithms.gradient_allreduce`."""

from torchbagua.algorithms import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]
