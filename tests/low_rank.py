"""Valid arguments of the low-rank operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchbagua.native.low_rank import PIECE_ELEMENTS, num_entries

OPERATIONS = ("gram", "solve", "combine", "product")
# Rank and length of each factor: one vector, one element, more vectors than fit, several pieces, parts of a stripe.
FACTORS = [(4, 3 * PIECE_ELEMENTS), (1, 1), (1, 5), (7, 33), (5, 2), (13, 2 * PIECE_ELEMENTS + 57), (4, 1000)]
# Rows, columns and rank of each product; the columns are whole stripes, none, or both.
PRODUCTS = [(7, 64, 4), (5, 130, 1), (3, 1, 2), (300, 37, 9)]


def random_factors(factors: Sequence[tuple[int, int]] = FACTORS) -> Tensor:
    """Return factors with vectors that are zero, depend on others, are tiny, and are huge."""
    x = torch.randn(sum(rank * length for rank, length in factors), generator=torch.Generator().manual_seed(0))
    length = factors[0][1]
    x[length : 2 * length] = 2 * x[:length]
    x[2 * length : 3 * length] = 0
    x[-1000:] *= 1e30
    x[-2000:-1000] *= 1e-30
    return x


def tables_of(factors: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the pieces and matrices of factors that lie one after the other."""
    pieces, matrices, start = [], [], 0
    for matrix, (rank, length) in enumerate(factors):
        firsts = range(0, length, PIECE_ELEMENTS)
        matrices.append((len(pieces), len(firsts), rank))
        pieces += [(start + at, length, rank, min(PIECE_ELEMENTS, length - at), matrix) for at in firsts]
        start += rank * length
    return torch.tensor(pieces), torch.tensor(matrices)


def arguments_of(operation: str) -> list[Tensor]:
    """Return the arguments of an operation, in its order."""
    generator = torch.Generator().manual_seed(1)
    pieces, matrices = tables_of(FACTORS)
    entries = num_entries(13)
    if operation == "gram":
        return [random_factors(), pieces, torch.full((len(pieces), entries), 7.0, dtype=torch.float64)]
    if operation == "solve":
        products = torch.zeros(len(pieces), entries, dtype=torch.float64)
        torch.ops.torchbagua.low_rank_gram(random_factors(), pieces, products)
        return [products, matrices, torch.full((len(matrices), 2 * entries), 7.0, dtype=torch.float64)]
    if operation == "combine":
        coefficients = torch.randn(len(matrices), 2 * entries, generator=generator, dtype=torch.float64)
        return [coefficients, pieces, random_factors()]
    rows, starts = [], [0, 0, 0]
    for num_rows, columns, rank in PRODUCTS:
        for at in range(0, num_rows, 100):
            start, left, right = starts
            rows.append((start + at * columns, min(100, num_rows - at), columns, rank, left + at, num_rows, right))
        starts = [starts[0] + num_rows * columns, starts[1] + num_rows * rank, starts[2] + columns * rank]
    values, left, right = (torch.randn(length, generator=generator) for length in starts)
    return [left, right, torch.tensor(rows), torch.full_like(values, 7.0), values]


def bad_tables(operation: str) -> list[Tensor]:
    """Return tables with one row that points outside of a tensor."""
    arguments: Any = dict(zip(argument_names(operation), arguments_of(operation), strict=True))
    good = arguments["table"]
    bad = []
    for field in range(good.shape[1]):
        for value in (-1, 2**62, 2**63 - 1):
            table = good.clone()
            table[-1, field] = value
            if not (operation == "gram" and field == 4 and value != -1 and value < 2**62):
                bad.append(table)
    return bad


def argument_names(operation: str) -> list[str]:
    """Return the names of an operation's arguments, in its order."""
    return [arg.name for arg in getattr(torch.ops.torchbagua, f"low_rank_{operation}").default._schema.arguments]
