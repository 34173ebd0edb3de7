"""Bagua's `algorithms.decentralized`."""

from torchbagua.algorithms.weights.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]
