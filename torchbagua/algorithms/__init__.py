"""The algorithms, and the registry of their names.

May import runtime and what is below it: they know no DDP, no FSDP2 and no GradScaler.
Begin with base.py, which describes an algorithm, and impl.py, which runs one; then gradient/bytegrad.py.
"""

from torchbagua.algorithms.base import Algorithm, available_algorithms, get, init_for, register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from torchbagua.algorithms.gradient.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from torchbagua.algorithms.gradient.compressed_all_reduce import (
    CompressedAllReduceAlgorithm,
    CompressedAllReduceAlgorithmImpl,
)
from torchbagua.algorithms.gradient.powersgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from torchbagua.algorithms.gradient.topk import TopKAlgorithm, TopKAlgorithmImpl
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.qadam.algorithm import QAdamAlgorithm, QAdamAlgorithmImpl
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from torchbagua.algorithms.weights.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from torchbagua.algorithms.weights.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl, LocalSGDAlgorithm

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
    "TopKAlgorithm",
    "TopKAlgorithmImpl",
    "available_algorithms",
    "get",
    "init_for",
    "register",
]
