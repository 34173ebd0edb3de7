"""The native operations: their schema, their readable reference, and the loader of the compiled kernels.

Importing this package registers schema, fakes and reference; it compiles and loads nothing.
"""

from torchbagua.native import reference, schema
from torchbagua.native.loader import load
from torchbagua.native.status import OperationStatus, status

__all__ = ["OperationStatus", "load", "reference", "schema", "status"]
