"""The algorithms, one module each under Bagua's names, and the registry of names."""

from torchbagua.algorithms.base import Algorithm, AlgorithmImpl, available_algorithms, get, register
from torchbagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from torchbagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "available_algorithms",
    "get",
    "register",
]
