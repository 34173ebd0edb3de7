"""mlbench's aggregations: a model's gradients or weights put together over the ranks, when you call it, without DDP."""

from torchbagua.aggregation.base import Aggregation
from torchbagua.aggregation.centralized import ALLREDUCE_AGGREGATION_OPS, AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from torchbagua.aggregation.compressed import PowerAggregation, SparsifiedAggregation
from torchbagua.aggregation.decentralized import DecentralizedAggregation
from torchbagua.aggregation.horovod import AllReduceAggregationHVD
from torchbagua.aggregation.local_optimizers import SignSGD, SparsifiedSGD
from torchbagua.aggregation.optimizers import CentralizedAdam, CentralizedSGD, DecentralizedSGD, PowerSGD

__all__ = [
    "ALLREDUCE_AGGREGATION_OPS",
    "AVG_CUSTOM",
    "AVG_WORLD",
    "Aggregation",
    "AllReduceAggregation",
    "AllReduceAggregationHVD",
    "CentralizedAdam",
    "CentralizedSGD",
    "DecentralizedAggregation",
    "DecentralizedSGD",
    "PowerAggregation",
    "PowerSGD",
    "SignSGD",
    "SparsifiedAggregation",
    "SparsifiedSGD",
]
