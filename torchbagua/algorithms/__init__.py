"""The algorithms, one module each under Bagua's names, and the registry of names."""

from torchbagua.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from torchbagua.algorithms.base import Algorithm, available_algorithms, get, register
from torchbagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from torchbagua.algorithms.compressed_allreduce import CompressedAllReduceAlgorithm, CompressedAllReduceAlgorithmImpl
from torchbagua.algorithms.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from torchbagua.algorithms.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl, LocalSGDAlgorithm
from torchbagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from torchbagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl, QAdamOptimizer
from torchbagua.algorithms.randomk import RandomKAlgorithm, RandomKAlgorithmImpl
from torchbagua.algorithms.topk import TopKAlgorithm, TopKAlgorithmImpl

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "CompressedAllReduceAlgorithm",
    "CompressedAllReduceAlgorithmImpl",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "LocalSGDAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "QAdamOptimizer",
    "RandomKAlgorithm",
    "RandomKAlgorithmImpl",
    "TopKAlgorithm",
    "TopKAlgorithmImpl",
    "available_algorithms",
    "get",
    "register",
]
