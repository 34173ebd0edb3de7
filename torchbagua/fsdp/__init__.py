"""For users of fully_shard: `attach` with arguments for sharded modules, and a backend that averages replicas.

May import `training` and the layers below it.
Begin with attach_sharded.py. The communication of a sharded module is in training/fsdp2.
"""

from torchbagua.fsdp.attach_sharded import attach
from torchbagua.fsdp.backend import align_blocks, register_backend

__all__ = ["align_blocks", "attach", "register_backend"]
