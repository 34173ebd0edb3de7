"""Bagua's `algorithms`: this package's algorithms under Bagua's module paths, and base classes of custom algorithms."""

from torchbagua.algorithms import Algorithm
from torchbagua.compat.bagua.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from torchbagua.compat.bagua.algorithms.base import AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
