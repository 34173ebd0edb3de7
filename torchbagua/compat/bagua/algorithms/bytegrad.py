"""Bagua's `algorithms.bytegrad`."""

from torchbagua.algorithms.gradient.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
