"""Bagua's `algorithms.bytegrad`."""

from torchbagua.algorithms import ByteGradAlgorithm
from torchbagua.algorithms import CompressedAllReduceAlgorithmImpl as ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
