"""For users of fully_shard: attach with what only sharded modules need, and a backend that averages replicas.

May import training and what is below it.
Begin with attach_sharded.py; what an attachment communicates for a sharded module is in training/fsdp2.
"""

from torchbagua.fsdp.attach_sharded import attach
from torchbagua.fsdp.registration import align_blocks, register_backend

__all__ = ["align_blocks", "attach", "register_backend"]
