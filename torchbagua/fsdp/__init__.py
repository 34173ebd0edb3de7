"""What users of fully_shard call beside `torchbagua.attach`.

May import training and what is below it.
Begin with registration.py; what attached algorithms communicate for a sharded module is in training/sharded.
"""

from torchbagua.fsdp.registration import align_blocks, register_backend

__all__ = ["align_blocks", "register_backend"]
