"""Bagua's `algorithms.gradient_allreduce`."""

from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]
