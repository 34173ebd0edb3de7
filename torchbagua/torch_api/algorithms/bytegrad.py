"""Bagua's `algorithms.bytegrad`."""

from torchbagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
