"""Other forms in which a tensor's values are averaged, such as QAdam's momenta instead of gradients.

Shape suffixes: N elements of the tensor.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from torchbagua.codecs.base import Compressor

# Returns the codec of a slice of a tensor's elements.
CodecOf = Callable[[slice], Compressor]


class ValueForm(Protocol):
    """Another form of the values of one float32 tensor while they are averaged."""

    def codec_of(self, compressor: Compressor) -> CodecOf:
        """Return codecs for one mean, which encode values in the other form, and decode from that form.

        The codec then reads and writes values only once. `encode` and `encode_feedback` may change their input.

        Args:
            compressor: the codec that encodes the other form.
        """
        ...

    def change(self, x_N: torch.Tensor) -> None:
        """Convert the values to the other form, in place."""
        ...

    def change_back(self, x_N: torch.Tensor) -> None:
        """Convert the mean back to the form that the values had, in place."""
        ...
