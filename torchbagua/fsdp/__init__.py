"""Modules that fully_shard has sharded: their gradients, over replicas too, and the weights that they gather."""

from torchbagua.fsdp.registration import align_blocks, register_backend

__all__ = ["align_blocks", "register_backend"]
