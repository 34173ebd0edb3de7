"""The mean in full precision by the backend's own all-reduce, which is tuned to the machine."""

import torch

from torchbagua.codecs.base import TensorSpec
from torchbagua.observe.events import Details
from torchbagua.observe.tracer import Span
from torchbagua.transport.communicator import Communicator


class AllReduceMean:
    """Mean (or sum) of a flat tensor, reduced in the backend's order: bitwise equal on all ranks."""

    def __init__(
        self, communicator: Communicator, spec: TensorSpec, divisor: float, *, divides_first: bool = False
    ) -> None:
        self._communicator = communicator
        self._name = spec.name
        self._is_mean = divisor != 1
        self._divides_first = divides_first or spec.dtype == torch.float16
        # Divide by a tensor if the result need not be bitwise equal to torch's: to divide by a number, a GPU multiplies
        # by its reciprocal.
        self._divisor = divisor if divides_first else torch.full((1,), divisor, device=spec.device)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` to `out_N`, another tensor of the same shape and dtype; in place by default."""
        communicator = self._communicator
        if out_N is None:
            out_N = x_N
        else:
            out_N.copy_(x_N)
        if self._is_mean and self._divides_first:
            out_N.div_(self._divisor)
        # The bytes that a rank sends in a ring. Events name the rank's neighbors in the ring, since the peers that the
        # backend chooses are unknown.
        num_bytes = 2 * out_N.nbytes * (communicator.size - 1) // communicator.size
        details = Details(
            "all_reduce", self._name, num_elements=out_N.numel(), raw_bytes=num_bytes, wire_bytes=num_bytes
        )
        on_host = communicator.posts_messages(out_N.device)

        def messages() -> list[Span]:
            return [
                communicator.message_span("send", communicator.rank_after(1), details, on_host=on_host),
                communicator.message_span("receive", communicator.rank_before(1), details, on_host=on_host),
            ]

        communicator.all_reduce(out_N, f"all_reduce of {self._name}", messages)
        if self._is_mean and not self._divides_first:
            out_N.div_(self._divisor)
