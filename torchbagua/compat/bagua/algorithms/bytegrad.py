"""Bagua's `algorithms.bytegrad`."""

from torchbagua.algorithms import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
