"""Norms of values and of their encoding errors, for observers, in sampled steps and for a part of each bucket."""

from functools import cached_property

import torch

from torchbagua.codecs.base import Compressor, WireLayout
from torchbagua.observe.tracer import Tracer

# In a sampled step, about this many elements of each bucket are decoded once more, which takes about 0.1 ms.
SAMPLED_ELEMENTS = 1 << 16


class EncodingErrorProbe:
    """Reports the norms of the encoded values and of the residual; their ratio is the relative error."""

    def __init__(self, tracer: Tracer, compressor: Compressor, layout: WireLayout, name: str) -> None:
        self._tracer = tracer
        self._compressor = compressor
        self._layout = layout
        self._name = name

    @cached_property
    def _beginning(self) -> WireLayout:
        """The layout of the chunk's first blocks. On a GPU, the host waits once for its table."""
        return self._layout.beginning(SAMPLED_ELEMENTS)

    def report(self, x_L: torch.Tensor, wire_W: torch.Tensor, known_residual_L: torch.Tensor | None = None) -> None:
        """Report the error of the chunk that is encoded in `wire_W`."""

        def norms() -> dict[str, torch.Tensor]:
            elements = self._beginning.elements[0]
            decoded_L = torch.empty_like(x_L[elements])
            self._compressor.decode(wire_W, self._beginning, decoded_L)
            if known_residual_L is None:
                encoded_L, residual_L = x_L[elements], x_L[elements].float() - decoded_L
            else:
                encoded_L, residual_L = decoded_L + known_residual_L[elements], known_residual_L[elements]
            return {"encoded": encoded_L.float().norm(), "left out": residual_L.float().norm()}

        self._tracer.measure(norms, self._name)
