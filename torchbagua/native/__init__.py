"""The native operations: each in plain torch, and the loader of the compiled kernels.

Importing this package registers the operations; it compiles and loads nothing.
"""

# What is imported registers its operations: a codec is a name here.
from torchbagua.native import blockk, low_rank, minmax_uint4, minmax_uint8, qadam, randomk, sign_1bit, topk  # noqa: F401
from torchbagua.native.loader import load
from torchbagua.native.status import OperationStatus, status

__all__ = ["OperationStatus", "load", "status"]
