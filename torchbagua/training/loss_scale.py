"""The loss scale of a GradScaler, which lies on a GPU, as a number on the host."""

import torch

from torchbagua._torch import loss_scale_of, num_writes


class LossScale:
    """Copies the loss scale to the host at a time when a read of it waits for little.

    `GradScaler.get_scale` in a backward waits for all that the GPU has still to do before. The copy is queued before
    the forward, behind the last step, for which `GradScaler.step` has had the host wait until its gradients were there.

    Args:
        scaler: whose scale it is.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._copied: tuple[torch.Tensor, int, HostCopy] | None = None

    def fetch(self) -> None:
        """Start to copy the scale, unless it has not changed since the last copy; before a forward."""
        scale = loss_scale_of(self._scaler)
        if scale is not None and is_on_gpu(scale) and not self._is_copied(scale):
            self._copied = scale, num_writes(scale), HostCopy(scale)

    def read(self) -> float:
        """Return the scale: from the copy, or, if it was changed since, from the scaler."""
        scale = loss_scale_of(self._scaler)
        if self._copied is not None and scale is not None and self._is_copied(scale):
            return self._copied[2].value()
        return self._scaler.get_scale()

    def _is_copied(self, scale: torch.Tensor) -> bool:
        return self._copied is not None and self._copied[0] is scale and self._copied[1] == num_writes(scale)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a `HostCopy` can be made of it."""
    return tensor.is_cuda


class HostCopy:
    """A copy of a number, which a GPU makes in the order of the current stream.

    Args:
        number: [] or [1], on the GPU.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
        self._number.copy_(number, non_blocking=True)
        self._is_there = torch.cuda.current_stream(number.device).record_event()

    def value(self) -> float:
        """Return the number; waits until the GPU has come to it."""
        self._is_there.synchronize()
        return float(self._number.item())
