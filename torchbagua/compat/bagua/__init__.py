"""Bagua's API under Bagua's names: `import torchbagua.compat.bagua as bagua` in a script written for Bagua.

May import only the public API.
Begin with data_parallel/bagua_distributed.py, then own_algorithm.py.

As in Bagua, the import adds methods to torch.nn.Module and torch.Tensor, such as `with_bagua`. `import torchbagua`
alone does not.

Four of Bagua's names are also names of classes in this package. Here they refer to BucketFacade, ProcessGroupFacade,
TensorFacade and ImplFacade: for instance, `bucket.BaguaBucket` is BucketFacade, but `torchbagua.extend.BaguaBucket`
is not.
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
