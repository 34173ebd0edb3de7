"""torchbagua: data-parallel training in plain PyTorch that sends less, or waits less."""

from torchbagua import fsdp, observe
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms.base import Algorithm, available_algorithms, register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm
from torchbagua.algorithms.gradient.bytegrad import ByteGradAlgorithm
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedAllReduceAlgorithm
from torchbagua.algorithms.gradient.powersgd import PowerSGDAlgorithm
from torchbagua.algorithms.gradient.topk import TopKAlgorithm
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.qadam.algorithm import QAdamAlgorithm
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithm
from torchbagua.algorithms.weights.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from torchbagua.algorithms.weights.diloco import DiLoCoAlgorithm, LocalSGDAlgorithm
from torchbagua.collectives import topology
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import CommEvent, Observer
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.weight_buckets import WeightBuckets
from torchbagua.training.attach import attach
from torchbagua.training.attachment import Attachment
from torchbagua.training.comm_hook import comm_hook
from torchbagua.transport.errors import CommunicationError
from torchbagua.version import __version__

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
    "TopKAlgorithm",
    "Topology",
    "UncompressedParametersWarning",
    "WeightBuckets",
    "__version__",
    "attach",
    "available_algorithms",
    "comm_hook",
    "fsdp",
    "observe",
    "register",
    "topology",
]
