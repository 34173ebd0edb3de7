"""The mean in full precision by the backend's own all-reduce, which knows the machine better than we do."""

import torch

from torchbagua.codecs.blocks import TensorSpec
from torchbagua.observe.events import Details
from torchbagua.observe.tracer import Span
from torchbagua.transport.communicator import Communicator


class AllReduceMean:
    """Mean (or sum) of a flat tensor, reduced in the backend's own order: the same bits on all ranks.

    Args:
        communicator: over all ranks; it posts no messages of tensors on this device.
        spec: the tensor.
        divisor: the number of ranks; 1 for the sum.
    """

    def __init__(self, communicator: Communicator, spec: TensorSpec, divisor: float) -> None:
        self._communicator = communicator
        self._name = spec.name
        # A tensor: division by a Python number would be a multiplication by its reciprocal.
        self._divisor = None if divisor == 1.0 else torch.full((1,), divisor, device=spec.device)
        # A sum of many ranks may leave the range of float16, so there each value is divided first, as DDP does.
        self._divides_first = spec.dtype == torch.float16

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: the backend refuses, see `Communicator.all_reduce`.
        """
        communicator = self._communicator
        if out_N is None:
            out_N = x_N
        else:
            out_N.copy_(x_N)
        if self._divisor is not None and self._divides_first:
            out_N.div_(self._divisor)
        # What a rank has to send in a ring; its neighbours there stand for the peers that the backend chooses.
        num_bytes = 2 * out_N.nbytes * (communicator.size - 1) // communicator.size
        details = Details(
            "all_reduce", self._name, num_elements=out_N.numel(), raw_bytes=num_bytes, wire_bytes=num_bytes
        )

        def messages() -> list[Span]:
            return [
                communicator.message_span("send", communicator.rank_after(1), details, on_host=False),
                communicator.message_span("receive", communicator.rank_before(1), details, on_host=False),
            ]

        communicator.all_reduce(out_N, f"all_reduce of {self._name}", messages)
        if self._divisor is not None and not self._divides_first:
            out_N.div_(self._divisor)
