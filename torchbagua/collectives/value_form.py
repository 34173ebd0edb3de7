"""Other forms of a tensor's values, in which they are averaged: of gradients, QAdam's momenta.

Shape suffixes: N elements of the tensor.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from torchbagua.codecs.base import Compressor

# Gives the codec of some elements of a tensor.
CodecOf = Callable[[slice], Compressor]


class ValueForm(Protocol):
    """Another form of the values of one tensor, float32, while they are averaged."""

    def codec_of(self, compressor: Compressor) -> CodecOf:
        """Return codecs for one mean: they encode the other form of what they are given, and decode from that form.

        Values are then read and written once, by the codec. `encode` and `encode_feedback` may change them.

        Args:
            compressor: encodes the other form.
        """
        ...

    def change(self, x_N: torch.Tensor) -> None:
        """Give the values the other form, in place."""
        ...

    def change_back(self, x_N: torch.Tensor) -> None:
        """Give the mean the form that the values had, in place."""
        ...
