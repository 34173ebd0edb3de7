"""Host memory through which gloo sends and receives what lies on a GPU."""

from collections.abc import Hashable

import torch

from torchbagua.transport.streams import wait_on_host


class Staging:
    """Pinned buffers, one for each message that may be under way at a time; allocated once, for the longest.

    All copies are made on the current stream of the tensor's GPU.

    Args:
        timeout_s: bound on every wait for the GPU; then TimeoutError.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._last_reads: dict[Hashable, torch.cuda.Event] = {}

    def copy_to_host(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `tensor` on the host; waits for the stream, which is the lane's."""
        host = self.receive_buffer(key, tensor)
        host.copy_(_bytes_of(tensor), non_blocking=True)
        wait_on_host(torch.cuda.current_stream(tensor.device).record_event(), self._timeout_s)
        return host

    def receive_buffer(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory on the host for the bytes of `tensor`; waits until what was there before has been read."""
        if (last_read := self._last_reads.pop(key, None)) is not None:
            wait_on_host(last_read, self._timeout_s)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < tensor.nbytes:
            buffer = self._buffers[key] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        return buffer[: tensor.nbytes]

    def copy_to_device(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Copy what `receive_buffer` has returned, and was filled, to `tensor`; the stream goes on when it is there."""
        _bytes_of(tensor).copy_(self._buffers[key][: tensor.nbytes], non_blocking=True)
        self._last_reads[key] = torch.cuda.current_stream(tensor.device).record_event()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
