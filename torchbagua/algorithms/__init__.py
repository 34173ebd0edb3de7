"""The algorithms and the registry of their names.

May import runtime and the packages below it. Nothing here imports DDP or FSDP2.
Begin with base.py, which defines algorithms; then gradient/compressed.py, and runtime/runner.py, which defines impls.
"""

from torchbagua.algorithms.base import Algorithm, available_algorithms
from torchbagua.algorithms.base import get as get
from torchbagua.algorithms.base import init_for as init_for
from torchbagua.algorithms.base import register as register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithmImpl as GradientAllReduceAlgorithmImpl
from torchbagua.algorithms.gradient.compressed import ByteGradAlgorithm, CompressedAllReduceAlgorithm
from torchbagua.algorithms.gradient.compressed import (
    CompressedAllReduceAlgorithmImpl as CompressedAllReduceAlgorithmImpl,
)
from torchbagua.algorithms.gradient.powersgd import PowerSGDAlgorithm
from torchbagua.algorithms.gradient.topk import TopKAlgorithm
from torchbagua.algorithms.qadam.algorithm import QAdamAlgorithm
from torchbagua.algorithms.qadam.algorithm import QAdamAlgorithmImpl as QAdamAlgorithmImpl
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithm
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithmImpl as AsyncModelAverageAlgorithmImpl
from torchbagua.algorithms.weights.decentralized import DecentralizedAlgorithm
from torchbagua.algorithms.weights.decentralized import DecentralizedAlgorithmImpl as DecentralizedAlgorithmImpl
from torchbagua.algorithms.weights.diloco import DiLoCoAlgorithm, LocalSGDAlgorithm
from torchbagua.algorithms.weights.low_precision_ring import LowPrecisionDecentralizedAlgorithm
from torchbagua.algorithms.weights.low_precision_ring import (
    LowPrecisionDecentralizedAlgorithmImpl as LowPrecisionDecentralizedAlgorithmImpl,
)
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm as ModelAveragingAlgorithm
from torchbagua.algorithms.weights.rounds import SynchronousRounds as SynchronousRounds
from torchbagua.runtime.runner import AlgorithmImpl

# The same classes by short names; Bagua's names end in Algorithm.
AsyncModelAverage = AsyncModelAverageAlgorithm
ByteGrad = ByteGradAlgorithm
CompressedAllReduce = CompressedAllReduceAlgorithm
Decentralized = DecentralizedAlgorithm
DiLoCo = DiLoCoAlgorithm
GradientAllReduce = GradientAllReduceAlgorithm
LocalSGD = LocalSGDAlgorithm
LowPrecisionDecentralized = LowPrecisionDecentralizedAlgorithm
PowerSGD = PowerSGDAlgorithm
QAdam = QAdamAlgorithm
TopK = TopKAlgorithm

# The package root exports these names; this is the only place that lists them. Names imported `as` themselves above are
# public too, for the APIs of other projects (compat), which name the impl classes.
__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverage",
    "AsyncModelAverageAlgorithm",
    "ByteGrad",
    "ByteGradAlgorithm",
    "CompressedAllReduce",
    "CompressedAllReduceAlgorithm",
    "Decentralized",
    "DecentralizedAlgorithm",
    "DiLoCo",
    "DiLoCoAlgorithm",
    "GradientAllReduce",
    "GradientAllReduceAlgorithm",
    "LocalSGD",
    "LocalSGDAlgorithm",
    "LowPrecisionDecentralized",
    "LowPrecisionDecentralizedAlgorithm",
    "PowerSGD",
    "PowerSGDAlgorithm",
    "QAdam",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "TopK",
    "TopKAlgorithm",
    "available_algorithms",
]
