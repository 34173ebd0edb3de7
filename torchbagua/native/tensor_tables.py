"""Converts lists of tensors to the tables of csrc_cuda/kernels/tensor_table.cuh: the counterpart of cuda/qadam.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

# As in csrc_cuda/kernels/tensor_table.cuh and cuda/qadam.h.
TABLE_THREADS = 256
TABLE_ROWS = 64
CHUNK_ELEMENTS = 8192


class TensorTable(ctypes.Structure):
    """The tensors of one launch; each row has one pointer per list."""

    rows: Any
    num_chunks: int
    num_rows: int
    chunk_elements: int


@functools.cache
def table_type(num_pointers: int) -> type[TensorTable]:
    """Return the table type with `num_pointers` pointers per row."""

    class Row(ctypes.Structure):
        _fields_ = [
            ("pointers", ctypes.c_void_p * num_pointers),
            ("num_elements", ctypes.c_longlong),
            ("first_chunk", ctypes.c_longlong),
        ]

    class Table(TensorTable):
        _fields_ = [
            ("rows", Row * TABLE_ROWS),
            ("num_chunks", ctypes.c_longlong),
            ("num_rows", ctypes.c_int),
            ("chunk_elements", ctypes.c_int),
        ]

    return Table


def tables_of(lists: Sequence[list[Tensor]], kinds: list[Tensor]) -> Iterator[tuple[TensorTable, Tensor]]:
    """Yield tables that together contain all tensors, each with its first tensor in `kinds`, which is one of the lists.

    A table contains consecutive tensors with the same device and, in the list `kinds`, the same dtype.
    """
    start = 0
    while start < len(kinds):
        first = kinds[start]
        table = table_type(len(lists))(chunk_elements=CHUNK_ELEMENTS)
        for kind, *tensors in zip(*(column[start : start + TABLE_ROWS] for column in (kinds, *lists)), strict=True):
            if (kind.dtype, kind.device) != (first.dtype, first.device):
                break
            row = table.rows[table.num_rows]
            row.pointers[:] = [tensor.data_ptr() for tensor in tensors]
            row.num_elements, row.first_chunk = kind.numel(), table.num_chunks
            table.num_rows += 1
            table.num_chunks += -(-kind.numel() // CHUNK_ELEMENTS)
        start += table.num_rows
        yield table, first
