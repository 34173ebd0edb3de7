"""mlbench's API: explicit calls aggregate a model's gradients or weights over the ranks, without DDP.

May import only the public API.
Begin with base.py, then centralized.py.
"""

from torchbagua.compat.mlbench.base import Aggregation
from torchbagua.compat.mlbench.centralized import ALLREDUCE_AGGREGATION_OPS, AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from torchbagua.compat.mlbench.compressed import PowerAggregation, SparsifiedAggregation
from torchbagua.compat.mlbench.decentralized import DecentralizedAggregation
from torchbagua.compat.mlbench.horovod import AllReduceAggregationHVD
from torchbagua.compat.mlbench.local_optimizers import SignSGD, SparsifiedSGD
from torchbagua.compat.mlbench.optimizers import CentralizedAdam, CentralizedSGD, DecentralizedSGD, PowerSGD

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
