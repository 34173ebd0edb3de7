"""torchbagua: data-parallel training in plain PyTorch that sends less, or waits less."""

from torchbagua import topology, traces
from torchbagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    CompressedAllReduceAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    RandomKAlgorithm,
    TopKAlgorithm,
    available_algorithms,
    register,
)
from torchbagua.attach import attach
from torchbagua.attachment import Attachment
from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import BaguaProcessGroup, CommunicationError
from torchbagua.comm_hook import comm_hook
from torchbagua.events import CommEvent, Observer
from torchbagua.topology import Topology
from torchbagua.version import __version__
from torchbagua.weights import WeightBuckets

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "Attachment",
    "BaguaBucket",
    "BaguaProcessGroup",
    "BaguaTensor",
    "ByteGradAlgorithm",
    "CommEvent",
    "CommunicationError",
    "CompressedAllReduceAlgorithm",
    "DecentralizedAlgorithm",
    "DiLoCoAlgorithm",
    "GradientAllReduceAlgorithm",
    "LocalSGDAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "Observer",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "RandomKAlgorithm",
    "TopKAlgorithm",
    "Topology",
    "WeightBuckets",
    "__version__",
    "attach",
    "available_algorithms",
    "comm_hook",
    "register",
    "topology",
    "traces",
]
