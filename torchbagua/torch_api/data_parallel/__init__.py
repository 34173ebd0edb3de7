"""Bagua's `data_parallel`: DistributedDataParallel with an algorithm."""

from torchbagua.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
