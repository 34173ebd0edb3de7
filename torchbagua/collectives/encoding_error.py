"""What observers are told of the values themselves, in the steps that they sample: norms of a part of them."""

from functools import cached_property

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import WireLayout
from torchbagua.observe.tracer import Tracer

# Of each bucket about so many are decoded once more in a sampled step, which takes some 0.1 ms.
SAMPLED_ELEMENTS = 1 << 16


class EncodingErrorProbe:
    """Tells the norms of what a compressor has encoded and of what that left out; their ratio is the relative error.

    Args:
        tracer: whose observers are told.
        compressor: what encodes.
        layout: of a chunk alone.
        name: of the tensor.
    """

    def __init__(self, tracer: Tracer, compressor: Compressor, layout: WireLayout, name: str) -> None:
        self._tracer = tracer
        self._compressor = compressor
        self._layout = layout
        self._name = name

    @property
    def is_wanted(self) -> bool:
        """Whether an observer samples this step, and the wire can leave something out."""
        return self._tracer.samples and not self._compressor.wire_is_tensor

    @cached_property
    def _beginning(self) -> WireLayout:
        """The first blocks of the chunk; on a GPU its table is waited for, once."""
        return self._layout.beginning(SAMPLED_ELEMENTS)

    def tell(self, x_L: torch.Tensor, wire_W: torch.Tensor, left_out_L: torch.Tensor | None = None) -> None:
        """Tell of the chunk that has been encoded into `wire_W`.

        Args:
            x_L: what was encoded; with `left_out_L` it may hold anything.
            wire_W: the chunk's wire.
            left_out_L: what the wire leaves out, where that is known.
        """

        def norms() -> dict[str, torch.Tensor]:
            elements = self._beginning.elements[0]
            decoded_L = torch.empty_like(x_L[elements])
            self._compressor.decode(wire_W, self._beginning, decoded_L)
            if left_out_L is None:
                encoded_L, rest_L = x_L[elements], x_L[elements].float() - decoded_L
            else:
                encoded_L, rest_L = decoded_L + left_out_L[elements], left_out_L[elements]
            return {"encoded": encoded_L.float().norm(), "left out": rest_L.float().norm()}

        self._tracer.measure(norms, self._name)
