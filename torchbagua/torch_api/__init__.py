"""Bagua's API under its own names: `import torchbagua.torch_api as bagua` in a script that was written for Bagua.

Importing it gives torch.nn.Module and torch.Tensor the methods that Bagua gives them, `with_bagua` among them. `import
torchbagua` alone does not.
"""

from torchbagua.torch_api import algorithms, communication, data_parallel, distributed, env, tensor
from torchbagua.torch_api.communication import (
    BaguaProcessGroup,
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_object,
    from_torch_group,
    gather,
    gather_inplace,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from torchbagua.torch_api.distributed import BaguaModule
from torchbagua.torch_api.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size
from torchbagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaModule",
    "BaguaProcessGroup",
    "BaguaTensor",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communication",
    "data_parallel",
    "env",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

distributed.install()
tensor.install()
