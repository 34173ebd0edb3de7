"""Compiled kernels, the same operations in plain torch, and the code that builds, loads and launches the kernels.

May import observe and the modules whose names begin with _. Importing it registers the operations and compiles nothing.
Begin with ops.py, the table of operations, then loader.py.
"""

# Each imported module registers its operations: to add a codec, add its module here.
from torchbagua.native import blockk, low_rank, minmax_uint4, minmax_uint8, qadam, ring, sign1bit, topk  # noqa: F401
from torchbagua.native.loader import OperationStatus, load, status

__all__ = ["OperationStatus", "load", "status"]
