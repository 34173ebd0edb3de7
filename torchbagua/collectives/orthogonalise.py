"""Orthonormal factors: the Gram-Schmidt process over the vectors of several factors at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchbagua.native.low_rank import PIECE_ELEMENTS, num_entries


class FactorPlace(NamedTuple):
    """The place of a factor in a flat tensor: `rank` vectors of `length` elements, one after the other."""

    start: int
    rank: int
    length: int

    @property
    def elements(self) -> slice:
        """The elements of the factor."""
        return slice(self.start, self.start + self.rank * self.length)


class Orthogonaliser:
    """Makes the vectors of each factor orthonormal.

    It runs the Gram-Schmidt process on the inner products of the vectors, in float64. So it reads a factor twice,
    however many vectors that has. Every sum has a fixed order, so equal values give bitwise equal results on every
    machine. A vector that is zero, or linearly dependent on earlier vectors to within rounding, becomes zero. A vector
    with NaN or Inf becomes NaN, and so do the vectors after it.

    Args:
        places: the places of the factors; no factor is empty.
        device: the device of the flat tensor.
    """

    def __init__(self, places: Sequence[FactorPlace], device: torch.device) -> None:
        pieces: list[tuple[int, ...]] = []
        matrices: list[tuple[int, ...]] = []
        for matrix, (start, rank, length) in enumerate(places):
            firsts = range(0, length, PIECE_ELEMENTS)
            matrices.append((len(pieces), len(firsts), rank))
            pieces += [(start + at, length, rank, min(PIECE_ELEMENTS, length - at), matrix) for at in firsts]
        self._pieces = torch.tensor(pieces, device=device)
        self._matrices = torch.tensor(matrices, device=device)
        most = max(num_entries(place.rank) for place in places)
        self._products = torch.zeros(len(pieces), most, dtype=torch.float64, device=device)
        self._coefficients = torch.zeros(len(matrices), 2 * most, dtype=torch.float64, device=device)

    def __call__(self, factors: torch.Tensor) -> None:
        """Orthonormalize the factors in place, in a flat float32 tensor."""
        torch.ops.torchbagua.low_rank_gram(factors, self._pieces, self._products)
        torch.ops.torchbagua.low_rank_solve(self._products, self._matrices, self._coefficients)
        torch.ops.torchbagua.low_rank_combine(self._coefficients, self._pieces, factors)
