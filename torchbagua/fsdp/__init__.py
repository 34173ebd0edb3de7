"""Modules that fully_shard has sharded: their gradients, over replicas too, and the weights that they gather."""

from torchbagua.fsdp.communication import communicated_by
from torchbagua.fsdp.gather import check_quantize_weights
from torchbagua.fsdp.parts import check_all_reduce_hooks, check_reduce_scatters, check_sharded, sharding_group
from torchbagua.fsdp.registration import align_blocks, register_backend

__all__ = [
    "align_blocks",
    "check_all_reduce_hooks",
    "check_quantize_weights",
    "check_reduce_scatters",
    "check_sharded",
    "communicated_by",
    "register_backend",
    "sharding_group",
]
