"""Bagua's `data_parallel`: DistributedDataParallel with an algorithm."""

from torchbagua.compat.bagua.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
