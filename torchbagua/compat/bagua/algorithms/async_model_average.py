"""Bagua's `algorithms.async_model_average`."""

from torchbagua.algorithms import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl"]
