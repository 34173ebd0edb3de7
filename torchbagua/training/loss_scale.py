"""Copies a GradScaler's loss scale from the GPU to the host."""

from collections.abc import Callable

import torch

from torchbagua._torch import loss_scale_of, num_writes


class LossScale:
    """Copies the loss scale to the host early, so that a read of it hardly blocks.

    In a backward, `GradScaler.get_scale` waits for all work that was queued on the GPU before it. The copy is queued
    before the forward, right after the last step. In that step `GradScaler.step` already made the host wait for the
    gradients, so little work is left ahead of the copy.

    Args:
        scaler: the GradScaler.
        wait: waits until the GPU has reached an event; raises an error if this takes too long.
    """

    def __init__(self, scaler: torch.amp.GradScaler, wait: Callable[[torch.cuda.Event], object]) -> None:
        self._scaler = scaler
        self._wait = wait
        self._copied: tuple[torch.Tensor, int, HostCopy] | None = None

    def fetch(self) -> None:
        """Start copying the scale if it has changed since the last copy. Call it before a forward."""
        scale = loss_scale_of(self._scaler)
        if scale is not None and is_on_gpu(scale) and not self._is_copied(scale):
            self._copied = scale, num_writes(scale), HostCopy(scale)

    def read(self) -> float:
        """Return the scale from the copy or, if the scale has changed since, from the scaler."""
        scale = loss_scale_of(self._scaler)
        if self._copied is not None and scale is not None and self._is_copied(scale):
            return self._copied[2].value(self._wait)
        return self._scaler.get_scale()

    def _is_copied(self, scale: torch.Tensor) -> bool:
        return self._copied is not None and self._copied[0] is scale and self._copied[1] == num_writes(scale)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether `HostCopy` can copy this tensor."""
    return tensor.is_cuda


class HostCopy:
    """A host copy of a number, which the GPU writes in the order of the current stream.

    Args:
        number: [] or [1], on the GPU.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
        self._number.copy_(number, non_blocking=True)
        self._done = torch.cuda.current_stream(number.device).record_event()

    def value(self, wait: Callable[[torch.cuda.Event], object]) -> float:
        """Return the number, once the GPU has copied it."""
        wait(self._done)
        return float(self._number.item())
