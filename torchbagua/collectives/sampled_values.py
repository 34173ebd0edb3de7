"""What observers are told of the values themselves, in the steps that they sample: norms of a part of them."""

from collections.abc import Callable

import torch

from torchbagua.collectives.error_feedback import ErrorFeedback
from torchbagua.tracer import Tracer

# Of each bucket about so many are decoded once more in a sampled step, which takes some 0.1 ms.
SAMPLED_ELEMENTS = 1 << 16


def tell_error(tracer: Tracer, bucket: str, parts: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Tell the norms of what was encoded, and of what that left out; their ratio is the relative error.

    Args:
        tracer: whose observers are told.
        bucket: served by it.
        parts: computes both, of any dtype.
    """

    def norms() -> dict[str, torch.Tensor]:
        encoded_L, left_out_L = parts()
        return {"encoded": encoded_L.float().norm(), "left out": left_out_L.float().norm()}

    tracer.measure(norms, bucket)


def tell_residuals(tracer: Tracer, bucket: str, feedback: ErrorFeedback) -> None:
    """Tell the norms of the residuals that are staged on this rank."""
    everything = slice(None)

    def norms() -> dict[str, torch.Tensor]:
        residuals = {"residual of what is sent": feedback.sent, "residual of the mean": feedback.mean}
        return {name: residual.staged(everything).norm() for name, residual in residuals.items()}

    tracer.measure(norms, bucket)
