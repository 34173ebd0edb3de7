"""Bagua's API under its own names: `import torchbagua.compat.bagua as bagua` in a script that was written for Bagua.

May import whatever users may.
Begin with data_parallel/bagua_distributed.py, then own_algorithm.py.

Importing it gives torch.nn.Module and torch.Tensor the methods that Bagua gives them, `with_bagua` among them. `import
torchbagua` alone does not.

Four of Bagua's names are names of this package's classes too. Here they stand for BucketFacade, ProcessGroupFacade,
TensorFacade and ImplFacade: `bucket.BaguaBucket` is a BucketFacade, for instance, and `torchbagua.BaguaBucket` is not.
"""

from torchbagua.compat.bagua import algorithms, communication, data_parallel, distributed, env, tensor
from torchbagua.compat.bagua.communication import *  # noqa: F403
from torchbagua.compat.bagua.distributed import BaguaModule
from torchbagua.compat.bagua.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size
from torchbagua.compat.bagua.tensor import BaguaTensor

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "algorithms",
    "communication",
    "data_parallel",
    "env",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
]
__all__ += communication.__all__

distributed.install()
tensor.install()
