"""LowPrecisionRing's update, a ring of compressed differences, in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.ops import FLOATS, check_arguments, define_op


def ring_difference(weights: Tensor, own: Tensor, left: Tensor, right: Tensor, difference: Tensor) -> None:
    """Write `left / 3 + weights + right / 3 - 5/3 own`, summed in this order, to `difference`."""
    # The divisors are tensors: on a GPU, torch divides by a Python number by multiplying by its reciprocal.
    three = torch.full((1,), 3.0, dtype=left.dtype, device=left.device)
    five_thirds = torch.div(torch.full_like(three, 5.0), three)
    torch.add(torch.div(left, three), weights, out=difference)
    difference.add_(torch.div(right, three)).sub_(own * five_thirds)


def ring_advance(difference: Tensor, own: Tensor, weights: Tensor) -> None:
    """Add `difference` to `own` and copy the sum to `weights`."""
    weights.copy_(own.add_(difference))


def _check_difference(weights: Tensor, own: Tensor, left: Tensor, right: Tensor, difference: Tensor) -> None:
    kinds = dict.fromkeys(["weights", "own", "left", "right", "difference"], FLOATS)
    check_arguments("ring_difference", kinds, weights, own, left, right, difference)


def _check_advance(difference: Tensor, own: Tensor, weights: Tensor) -> None:
    kinds = dict.fromkeys(["difference", "own", "weights"], FLOATS)
    check_arguments("ring_advance", kinds, difference, own, weights)


# CPU only: on a GPU, each torch operation in these functions is one launch over all weights.
define_op("ring", "difference", _check_difference, ring_difference, ("difference",), is_cpu_only=True)
define_op("ring", "advance", _check_advance, ring_advance, ("own", "weights"), is_cpu_only=True)
